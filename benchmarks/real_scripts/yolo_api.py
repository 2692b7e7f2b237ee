from ultralytics import YOLO
model = YOLO("yolov8n.yaml")
results = model.train(data="data/yolo/data.yaml", epochs=300, imgsz=64, batch=8, device="cpu", workers=1, project="runs")
