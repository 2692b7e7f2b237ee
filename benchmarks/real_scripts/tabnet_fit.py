import numpy as np
from pytorch_tabnet.tab_model import TabNetClassifier
X, y = np.random.rand(8000, 16), np.random.randint(2, size=8000)
clf = TabNetClassifier()
clf.fit(X[:6400], y[:6400], eval_set=[(X[6400:], y[6400:])], max_epochs=10, batch_size=256, virtual_batch_size=128)
print(clf.predict(X[:5])); clf.save_model("tabnet_model")
