import numpy as np
from torch_rechub.basic.features import DenseFeature, SparseFeature
from torch_rechub.models.ranking import DeepFM
from torch_rechub.trainers import CTRTrainer
from torch_rechub.utils.data import DataGenerator
n = 12800; x = {f"C{i}": np.random.randint(50, size=n) for i in range(6)} | {f"I{i}": np.random.rand(n).astype("float32") for i in range(4)}; y = np.random.randint(2, size=n).astype("float32")
dense, sparse = [DenseFeature(f"I{i}") for i in range(4)], [SparseFeature(f"C{i}", vocab_size=50, embed_dim=16) for i in range(6)]
train_dl, val_dl, test_dl = DataGenerator(x, y).generate_dataloader(split_ratio=[0.8, 0.1], batch_size=64, num_workers=0)
model = DeepFM(deep_features=dense + sparse, fm_features=sparse, mlp_params={"dims": [64, 32], "dropout": 0.2, "activation": "relu"})
trainer = CTRTrainer(model, optimizer_params={"lr": 1e-3, "weight_decay": 1e-5}, n_epoch=4, earlystop_patience=10, device="cpu", model_path="./")
trainer.fit(train_dl, val_dl)
print(trainer.evaluate(trainer.model, test_dl))
