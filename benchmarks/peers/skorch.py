"skorch"

import torch
from skorch import NeuralNet, NeuralNetClassifier
from skorch.callbacks import Callback
from skorch.helper import predefined_split
from torch import nn

from ..workloads import with_loaders

NAME, IMPORT, PACKAGE = "skorch", "import skorch", "skorch"


class Ready(torch.utils.data.Dataset):
    "Ready batches; the loader is among them"

    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


def handed_on(dataset, **kwargs):
    "In the place of a loader"
    return dataset.pairs


class Nothing(Callback):
    def on_batch_begin(self, net, batch=None, training=None, **kwargs):
        pass

    def on_batch_end(self, net, batch=None, training=None, **kwargs):
        pass


def options(work):
    loaders = dict(iterator_train=handed_on, iterator_valid=handed_on)
    return dict(
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=work.lr,
        max_epochs=work.epochs,
        **loaders,
    )


def bare(work, model, hooks=0):
    callbacks = [(f"nothing{i}", Nothing()) for i in range(hooks)] or "disable"
    net = NeuralNet(model, callbacks=callbacks, train_split=None, verbose=0, **options(work))
    net.initialize()
    if hooks:  # Only these: the usual ones would count as well
        net.callbacks_ = [(name, cb) for name, cb in net.callbacks_ if name.startswith("nothing")]
    return lambda: finished(net, work)


def finished(net, work):
    net.partial_fit(Ready(work.train), None)


def measured(work, model):
    "Accuracy on validation alone"
    split = predefined_split(Ready(work.valid))
    net = NeuralNetClassifier(model, train_split=split, classes=list(range(10)), **options(work))
    net.initialize()

    def run():
        finished(net, work)
        last = net.history[-1]
        return dict(train_loss=last["train_loss"], valid_loss=last["valid_loss"], accuracy=last["valid_acc"])

    return run


def tutorial(work, model):
    return lambda: measured(with_loaders(work), model)()


VARIANTS = {NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial)}
