"""Recurrent language models over words, trained by truncated backpropagation through time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from castwise.apply.pytree import Batch
from castwise.registry.workloads import Workload
from castwise.trial.models.chunked_loss import chunked_loss
from castwise.trial.models.task import BatchScore, Task

# Source: pytorch/examples word_language_model main.py at 0d3fe14a (--bptt, --nlayers); WikiText-2 has 33,278
# different words, <eos> among them.
_VOCABULARY = 33_278
_NUM_STEPS = 35
_NUM_LAYERS = 2
_INITIAL_RANGE = 0.1

_RECURRENT: dict[str, Callable[..., nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN_TANH": nn.RNN}

# Shape (layers, batch, width); an LSTM's is a pair, output and cell state.
Hidden = Tensor | tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Embedding, recurrent layers and an untied linear decoder, with dropout between all of them.

    Source: pytorch/examples word_language_model model.py at 0d3fe14a (`RNNModel`).
    """

    takes_infinite_logits = True  # its loss is the cross entropy

    def __init__(self, kind: str, width: int, dropout: float) -> None:
        """Build the model of kind `LSTM`, `GRU` or `RNN_TANH`, with embedding and recurrent layers of one width."""
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(_VOCABULARY, width)
        self.rnn = _RECURRENT[kind](input_size=width, hidden_size=width, num_layers=_NUM_LAYERS, dropout=dropout)
        self.decoder = nn.Linear(width, _VOCABULARY)
        nn.init.uniform_(self.encoder.weight, -_INITIAL_RANGE, _INITIAL_RANGE)
        nn.init.uniform_(self.decoder.weight, -_INITIAL_RANGE, _INITIAL_RANGE)
        nn.init.zeros_(self.decoder.bias)

    def forward(
        self, tokens: Tensor, hidden: Hidden | None, targets: Tensor | None = None, num_chunks: int = 1
    ) -> tuple[Tensor, Hidden]:
        """Return the logits of every next token, or with targets their mean cross entropy, and the last state.

        Args:
            tokens: Shape (steps, batch), int64.
            hidden: The state to start from; None starts from zeros.
            targets: The next tokens, of shape (steps * batch,); None asks for logits, shape (steps, batch, vocabulary).
            num_chunks: Parts in which the loss is computed.
        """
        embedded = self.drop(self.encoder(tokens))
        output, hidden = self.rnn(embedded, hidden)
        output = self.drop(output)
        if targets is not None:
            return chunked_loss(output, self.decoder, targets, num_chunks), hidden
        return self.decoder(output), hidden


class CarriedLoss:
    """The loss of one batch, started from the state in which the batch before ended.

    The state is detached, so that backward ends at the batch's first token; a batch of another size starts
    from zeros. Source: pytorch/examples word_language_model main.py at 0d3fe14a (`repackage_hidden`).
    """

    def __init__(self) -> None:
        self.hidden: Hidden | None = None
        self._batch_size = 0

    def compute_loss(self, model: nn.Module, batch: Batch, num_chunks: int = 1) -> Tensor:
        """Return the mean cross entropy, a float32 scalar, of a `LanguageModel`, which may be wrapped.

        A batch is tokens of shape (steps, batch) and the next tokens, of shape (steps * batch,).
        """
        tokens, targets = batch
        if tokens.shape[1] != self._batch_size:
            self.hidden, self._batch_size = None, tokens.shape[1]
        if num_chunks > 1 and torch.is_grad_enabled():
            result: tuple[Tensor, Hidden] = model(tokens, self.hidden, targets, num_chunks)
            self.hidden = _detach(result[1])
            return result[0]
        logits, hidden = model(tokens, self.hidden)
        self.hidden = _detach(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> BatchScore:
        """Return a validation batch's summed loss and its number of targets; the state is carried on as in training."""
        num_targets = batch[1].numel()
        return self.compute_loss(model, batch) * num_targets, None, num_targets

    def read(self) -> tuple[Tensor, ...]:
        """Return the state's tensors, none if the next batch starts from zeros."""
        if self.hidden is None:
            return ()
        return (self.hidden,) if isinstance(self.hidden, Tensor) else self.hidden

    def write(self, tensors: tuple[Tensor, ...]) -> None:
        """Start the next batch from these tensors, from zeros without any."""
        if not tensors:
            self.forget()
            return
        self.hidden = tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1])
        self._batch_size = tensors[0].shape[1]

    def forget(self) -> None:
        self.hidden = None


def _detach(hidden: Hidden) -> Hidden:
    if isinstance(hidden, Tensor):
        return hidden.detach()
    output, cell = hidden
    return output.detach(), cell.detach()


def build(row: Workload) -> Task:
    """Return the task of predicting the next of random tokens; a sample is 35 tokens of one column."""
    options = dict(row.options)
    model = LanguageModel(str(options["kind"]), int(options["width"]), float(options["dropout"]))
    carried = CarriedLoss()
    return Task(
        model=model,
        make_batches=make_batches,
        compute_loss=carried.compute_loss,
        evaluate_batch=carried.evaluate_batch,
        units_per_sample=_NUM_STEPS,
        recurrent_state=carried,
        begin_epoch=carried.forget,
        loss_with=carried.compute_loss,
    )


def make_batches(count: int, batch_size: int, device: torch.device, generator: torch.Generator) -> Sequence[Batch]:
    """Return batches of random tokens as `CarriedLoss` takes them, each of which goes on where the last one ends."""
    size = (count * _NUM_STEPS + 1, batch_size)
    stream = torch.randint(_VOCABULARY, size, generator=generator, device=device)
    starts = range(0, count * _NUM_STEPS, _NUM_STEPS)
    return [
        (stream[start : start + _NUM_STEPS], stream[start + 1 : start + 1 + _NUM_STEPS].flatten()) for start in starts
    ]
