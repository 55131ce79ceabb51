"""Rows whose dimensions are renamed, each beside what is like it and right.

Each planted one is found by the name of its rule; in the right ones nothing is found.
"""

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from isaac_loop import Trainer
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.data import DataLoaders
from marked import Marked
from working import found_in

planted, right = Marked(), Marked()


def trainer_with(dataset, collate_fn=None, model=None, cbs=()):
    dls = DataLoaders(DataLoader(dataset, 4, collate_fn=collate_fn))
    return Trainer(dls, F.mse_loss, optim.SGD, model or nn.Identity(), [BasicTrainCB(), *cbs])


class Images(Dataset):
    def __init__(self):
        self.images = np.random.rand(8, 6, 5, 3).astype(np.float32)

    def __len__(self):
        return len(self.images)


class GrayImages(Images):
    def __init__(self):
        self.images = np.random.rand(8, 6, 5, 1).astype(np.float32)


@planted
def unpacked_and_given_back():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i]
            h, w, c = img.shape
            return torch.from_numpy(img).reshape(c, h, w).float() / 255, 0.0

    return trainer_with(Rows())


@planted
def as_a_view_behind_a_line():
    class Rows(Images):
        def __getitem__(self, i):
            x = torch.tensor(self.images[i])
            h, w, c = x.size()
            x = x / 255
            return x.view(c, h, w), 0.0

    return trainer_with(Rows())


@planted
def by_numbers():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i]
            x = img.reshape(img.shape[2], img.shape[0], img.shape[1])
            return torch.as_tensor(x), 0.0

    return trainer_with(Rows())


@planted
def as_a_tuple_with_a_rest():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i]
            h, w, _ = img.shape
            return torch.from_numpy(img.reshape((-1, h, w))).unsqueeze(0), 0.0

    return trainer_with(Rows())


@planted
def with_a_number_of_channels():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i]
            h, w = img.shape[:2]
            return torch.from_numpy(np.reshape(img, (3, h, w))), 0.0

    return trainer_with(Rows())


@planted
def in_a_subset_of_several():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i]
            h, w, c = img.shape
            return img.reshape(c, h, w), 0.0

    return trainer_with(ConcatDataset([Subset(Rows(), [1, 2]), Rows()]))


@planted
def in_a_transform():
    def to_tensor(img):
        h, w, c = img.shape
        return torch.from_numpy(img).view(c, h, w)

    class Rows(Images):
        transform = None

        def __init__(self, transform):
            super().__init__()
            self.transform = transform

        def __getitem__(self, i):
            return self.transform(self.images[i]), 0.0

    return trainer_with(Rows(to_tensor))


@planted
def in_a_transform_with_a_call():
    class ToTensor:
        def __call__(self, img):
            h, w, c = img.shape
            return torch.from_numpy(img).view(c, h, w)

    class Rows(Images):
        def __init__(self):
            super().__init__()
            self.transforms = [ToTensor()]

        def __getitem__(self, i):
            img = self.images[i]
            for transform in self.transforms:
                img = transform(img)
            return img, 0.0

    return trainer_with(Rows())


@planted
def in_a_collate_function():
    def collate(rows):
        x = torch.stack([torch.from_numpy(img) for img, _ in rows])
        b, h, w, c = x.shape
        return x.reshape(b, c, h, w), torch.zeros(len(rows))

    class Rows(Images):
        def __getitem__(self, i):
            return self.images[i], 0.0

    return trainer_with(Rows(), collate)


@planted
def in_a_forward():
    class Net(nn.Module):
        def forward(self, x):
            b, t, d = x.shape
            return x.view(b, d, t)

    return trainer_with(TensorDataset(torch.rand(8, 3, 4), torch.rand(8)), model=Net())


@planted
def in_a_callback():
    class ChannelsFirstCB:
        def before_batch(self, trainer):
            x, y = trainer.batch
            b, h, w, c = x.shape
            trainer.batch = x.reshape(b, c, h, w), y

    return trainer_with(TensorDataset(torch.rand(8, 3, 4, 3), torch.rand(8)), cbs=[ChannelsFirstCB()])


@right
def permuted():
    class Rows(Images):
        def __getitem__(self, i):
            img = torch.from_numpy(self.images[i])
            h, w, c = img.shape
            return img.permute(2, 0, 1).reshape(c, h, w), 0.0

    return trainer_with(Rows())


@right
def transposed_before():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i]
            h, w, c = img.shape
            img = img.transpose(2, 0, 1)
            return torch.from_numpy(img).reshape(c, h, w), 0.0

    return trainer_with(Rows())


@right
def flattened():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i]
            h, w, c = img.shape
            return torch.from_numpy(img.reshape(h * w, c)), 0.0

    return trainer_with(Rows())


@right
def given_back_as_it_was():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i]
            h, w, c = img.shape
            flat = img.reshape(-1, c) - img.reshape(-1, c).mean(0)
            return torch.from_numpy(flat.reshape(h, w, c)).permute(2, 0, 1), 0.0

    return trainer_with(Rows())


@right
def a_shape_of_something_else():
    class Rows(Images):
        def __getitem__(self, i):
            img, other = self.images[i], self.images[0].T
            h, w, c = other.shape
            return torch.from_numpy(img).reshape(c, w, h), 0.0

    return trainer_with(Rows())


@right
def a_channel_that_was_added():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i][..., :1].mean(-1)
            img = img[..., None]
            h, w, c = img.shape
            return torch.from_numpy(img).reshape(c, h, w), 0.0

    return trainer_with(Rows())


@right
def one_channel():
    class Rows(GrayImages):
        def __getitem__(self, i):
            img = self.images[i]
            h, w, c = img.shape
            return torch.from_numpy(img).reshape(c, h, w), 0.0

    return trainer_with(Rows())


@right
def transposed_in_a_branch():
    class Rows(Images):
        def __getitem__(self, i):
            img = torch.from_numpy(self.images[i])
            h, w, c = img.shape
            if c == 3:
                img = img.permute(2, 0, 1).contiguous()
            return img.view(c, h, w), 0.0

    return trainer_with(Rows())


@right
def heads_of_attention():
    class Net(nn.Module):
        def forward(self, x):
            b, t, d = x.shape
            q = x.view(b, t, 2, d // 2).transpose(1, 2)
            y = q.transpose(1, 2).reshape(b, t, d)
            return y.reshape(t * b, d).view(b, t, d)

    return trainer_with(TensorDataset(torch.rand(8, 3, 4), torch.rand(8)), model=Net())


@right
def a_first_dimension_for_one_row():
    class Net(nn.Module):
        def forward(self, x):
            h, w = x.shape[-2:]
            return x.view(-1, 1, h, w)

    return trainer_with(TensorDataset(torch.rand(8, 3, 4), torch.rand(8)), model=Net())


@pytest.mark.parametrize("make", planted, ids=lambda o: o.__name__)
def test_a_planted_mistake_is_found(make):
    assert "view_for_transpose" in found_in(make())


@pytest.mark.parametrize("make", right, ids=lambda o: o.__name__)
def test_what_is_like_it_and_right_is_left_alone(make):
    assert found_in(make()) == []
