import torch
from torch import nn
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Accuracy, Loss
loader = lambda n: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(n, 1, 28, 28), torch.randint(10, (n,))), batch_size=64)
model = nn.Sequential(nn.Conv2d(1, 10, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1440, 10)); criterion = nn.CrossEntropyLoss()
trainer = create_supervised_trainer(model, torch.optim.RMSprop(model.parameters(), lr=0.005), criterion)
val = create_supervised_evaluator(model, metrics={"accuracy": Accuracy(), "loss": Loss(criterion)}); val_loader = loader(640)
trainer.add_event_handler(Events.EPOCH_COMPLETED, ModelCheckpoint("checkpoint", n_saved=2, require_empty=False), {"model": model})
@trainer.on(Events.ITERATION_COMPLETED(every=100))
def log(engine): print(engine.state.epoch, engine.state.output); val.run(val_loader); print(val.state.metrics)
trainer.run(loader(6400), max_epochs=5)
