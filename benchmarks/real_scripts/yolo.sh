yolo train model=yolov8n.yaml data=data/yolo/data.yaml imgsz=64 epochs=300 batch=8 device=cpu workers=1 project=runs
