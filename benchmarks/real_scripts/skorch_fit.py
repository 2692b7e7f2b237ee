import numpy as np, torch
from sklearn.datasets import make_classification
from skorch import NeuralNetClassifier
from torch import nn
X, y = make_classification(2000, 20, n_informative=10, random_state=0); X, y = X.astype(np.float32), y.astype(np.int64)
class MyModule(nn.Module):
    def __init__(self, num_units=64, nonlin=nn.ReLU()):
        super().__init__()
        self.dense0, self.nonlin, self.dropout, self.dense1, self.output, self.softmax = nn.Linear(20, num_units), nonlin, nn.Dropout(0.5), nn.Linear(num_units, num_units), nn.Linear(num_units, 2), nn.Softmax(dim=-1)
    def forward(self, X, **kwargs): return self.softmax(self.output(self.nonlin(self.dense1(self.dropout(self.nonlin(self.dense0(X)))))))
net = NeuralNetClassifier(MyModule, max_epochs=30, lr=0.1, iterator_train__shuffle=True)
net.fit(X, y)
print(net.predict_proba(X)[:2]); net.save_params(f_params="model.pkl")
