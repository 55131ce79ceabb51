"Keras on torch"

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: E402
from keras.layers import TorchModuleWrapper  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from ..workloads import ready_loader, with_loaders  # noqa: E402

NAME, IMPORT, PACKAGE = (
    "Keras on torch",
    "import os; os.environ['KERAS_BACKEND'] = 'torch'; import keras",
    "keras",
)


class Nothing(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        pass

    def on_train_batch_end(self, batch, logs=None):
        pass


def cross_entropy(y, preds):
    return F.cross_entropy(preds, y.long())


def made(work, model, **kwargs):
    net = keras.Sequential([TorchModuleWrapper(model)])
    net.compile(optimizer=keras.optimizers.SGD(work.lr), loss=cross_entropy, **kwargs)
    return net


def as_loader(pairs):
    return ready_loader(pairs) if isinstance(pairs, list) else pairs


def bare(work, model, hooks=0):
    net = made(work, model)
    callbacks = [Nothing() for _ in range(hooks)]
    return lambda: finished(net, work, verbose=0, callbacks=callbacks)


def finished(net, work, **kwargs):
    net.fit(as_loader(work.train), epochs=work.epochs, shuffle=False, **kwargs)


def measured(work, model):
    net = made(work, model, metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")])

    def run():
        history = net.fit(
            as_loader(work.train),
            validation_data=as_loader(work.valid),
            epochs=work.epochs,
            shuffle=False,
            verbose=2,
        ).history
        return dict(accuracy=history["val_accuracy"][-1])

    return run


def tutorial(work, model):
    return lambda: measured(with_loaders(work), model)()


VARIANTS = {NAME: dict(tiny=bare, typical=measured, cnn=bare, tutorial=tutorial)}
