import torch, torch.nn.functional as F, lightning as L
from torch import nn
class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3)); self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))
    def training_step(self, batch, batch_idx):
        x = batch[0].view(batch[0].size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss
    def configure_optimizers(self): return torch.optim.Adam(self.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.rand(3200, 1, 28, 28), torch.randint(10, (3200,)))
trainer = L.Trainer(max_epochs=3)
trainer.fit(LitAutoEncoder(), torch.utils.data.DataLoader(data, batch_size=32))
