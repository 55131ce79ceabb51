"""A small training that any of several programs may start: `python`, torchrun, Accelerate, Ray Train.

`python same_script.py OUT` trains and writes weights and losses to the file OUT, from main alone.
`--with accelerate` lets Accelerate do it, `--ray 2` starts it by Ray Train with two workers, `--launch 2` by
`launch`.
"""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from isaac_loop.all import AccelerateCB, BasicTrainCB, DistributedCB, MetricsCB, Trainer
from isaac_loop.data.dataloaders import DataLoaders
from isaac_loop.data.exact_loaders import exact_loader
from isaac_loop.device.launching import launch


def data(n, seed):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def train(config):
    "What every process does"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    dls = DataLoaders(exact_loader(data(53, 0), 8, seed=1), exact_loader(data(21, 1), 8, shuffle=False))
    several = AccelerateCB("no", cpu=True) if config["with"] == "accelerate" else DistributedCB(timeout=30)
    callbacks = [BasicTrainCB(), MetricsCB(show=False), several]
    trainer = Trainer(dls, F.mse_loss, torch.optim.Adam, model, callbacks)
    trainer.fit(2, lr=0.01)
    if int(os.environ.get("RANK", 0)) == 0:
        losses = [[row["train_loss"], row["valid_loss"]] for row in trainer.history]
        weights = torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()
        with open(config["out"], "w") as f:
            json.dump(dict(weights=weights, losses=losses, size=int(os.environ.get("WORLD_SIZE", 1))), f)


def by_ray(config, n):
    "Two workers on this machine"
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=n, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=n)).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--with", choices=["distributed", "accelerate"], default="distributed")
    parser.add_argument("--ray", type=int)
    parser.add_argument("--launch", type=int)
    config = vars(parser.parse_args())
    config["out"] = os.path.abspath(config["out"])
    if config["ray"]:
        by_ray(config, config["ray"])
    elif config["launch"]:
        launch(train, config["launch"], config)
    else:
        train(config)
