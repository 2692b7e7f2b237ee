import torch, torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool
n = torch.randint(10, 40, (1200,)).tolist()
dataset = [Data(x=torch.randn(k, 16), edge_index=torch.randint(k, (2, 3 * k)), y=torch.randint(2, (1,))) for k in n]
class GCN(torch.nn.Module):
    def __init__(self): super().__init__(); self.conv1, self.conv2, self.lin = GCNConv(16, 64), GCNConv(64, 64), torch.nn.Linear(64, 2)
    def forward(self, x, edge_index, batch): return self.lin(F.dropout(global_mean_pool(self.conv2(self.conv1(x, edge_index).relu(), edge_index), batch), p=0.5, training=self.training))
model = GCN(); optimizer = torch.optim.Adam(model.parameters(), lr=0.01); loader = DataLoader(dataset, batch_size=64, shuffle=True)
for epoch in range(1, 30):
    model.train()
    for data in loader: loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y); loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(f"Epoch: {epoch:03d}, loss {loss.item():.4f}")
