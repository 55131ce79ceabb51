"Gradients that a callback gathers over several batches, on what it holds itself, go on as well"

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from isaac_loop.basics.tensors import set_seed
from isaac_loop.checkpoints.checkpoint import CheckpointCB
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.loop.trainer import Trainer
from isaac_loop.train.training import BasicTrainCB

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
ROWS = list(zip(X, X.sum(1, keepdim=True)))


class CriticCB:
    "A network that learns beside the model, every third batch"

    def before_fit(self, trainer):
        self.net, self.n = nn.Linear(1, 1), 0
        self.opt = optim.SGD(self.net.parameters(), 0.1)

    def after_get_loss(self, trainer):
        loss = trainer.loss.detach().expand(len(trainer.preds), 1)
        F.mse_loss(self.net(trainer.preds.detach()), loss).backward()
        self.n += 1
        if self.n % 3 == 0:
            self.opt.step()
            self.opt.zero_grad()

    def held(self):
        return list(self.net.parameters())


class ScaleCB:
    "A number, in a dict, that the loss is scaled by"

    def before_fit(self, trainer):
        self.own, self.n = {"scale": torch.zeros((), requires_grad=True)}, 0

    def after_get_loss(self, trainer):
        trainer.loss = trainer.loss * self.own["scale"].exp()

    def after_step(self, trainer):
        self.n += 1
        if self.n % 3 == 0:
            with torch.no_grad():
                self.own["scale"] -= 0.1 * self.own["scale"].grad
            self.own["scale"].grad = None

    def held(self):
        return list(self.own.values())


class ListsCB(ScaleCB):
    "The same in a list, beside the trainer's model, which is not its own"

    def before_fit(self, trainer):
        super().before_fit(trainer)
        self.all = [*self.own.values(), trainer.model]


class AroundCB(CriticCB):
    "Beside a list and a dict that hold themselves"

    def before_fit(self, trainer):
        super().before_fit(trainer)
        self.ring, self.names = [], {}
        self.ring.append(self.ring)
        self.names["self"] = self.names


class TellingCB(CriticCB):
    "Tells its state, but for the gradients"

    def state_dict(self):
        return dict(net=self.net.state_dict(), n=self.n)

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.n = state["n"]


def run(kind, folder, cut=None):
    set_seed(1)
    callback = kind()

    def before_backward(trainer):
        if trainer.n_updates == cut:
            raise KeyboardInterrupt

    callbacks = [BasicTrainCB(), callback, CheckpointCB(folder, every=1), before_backward]
    dls, model = DataLoaders(exact_loader(ROWS, 16, seed=1)), nn.Linear(4, 1)
    trainer = Trainer(dls, F.mse_loss, optim.SGD, model, callbacks)
    try:
        trainer.fit(2, lr=0.1, valid=False)
    except KeyboardInterrupt:
        pass
    return [p.tolist() for p in (*callback.held(), *model.parameters())]


@pytest.mark.parametrize("kind", [CriticCB, ScaleCB, ListsCB, AroundCB, TellingCB])
@pytest.mark.parametrize("cut", [1, 4, 8])
def test_they_go_on(kind, cut, tmp_path):
    whole = run(kind, tmp_path / "whole")
    run(kind, tmp_path / "cut", cut)
    assert run(kind, tmp_path / "cut") == whole
