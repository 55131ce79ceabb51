"""Images and masks that are turned by draws of their own, each beside what is like it and right.

Each planted one is found by the name of its rule; in the right ones nothing is found.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from isaac_loop import Trainer
from isaac_loop.callbacks import BasicTrainCB
from isaac_loop.data import DataLoaders
from marked import Marked
from working import found_in

planted, right = Marked(), Marked()


def trainer_with(dataset, collate_fn=None, model=None, cbs=()):
    dls = DataLoaders(DataLoader(dataset, 4, collate_fn=collate_fn))
    return Trainer(dls, F.mse_loss, optim.SGD, model or nn.Identity(), [BasicTrainCB(), *cbs])


def hflip(x, p=0.5):
    return x.flip(-1) if random.random() < p else x


class Images(Dataset):
    def __init__(self):
        self.images, self.masks = torch.rand(2, 8, 3, 6, 6)

    def __len__(self):
        return len(self.images)


@planted
def in_what_is_returned():
    class Rows(Images):
        def __getitem__(self, i):
            return hflip(self.images[i]), hflip(self.masks[i])

    return trainer_with(Rows())


@planted
def in_lines_of_their_own():
    class Rows(Images):
        def __getitem__(self, i):
            img, mask = self.images[i], self.masks[i]
            img = hflip(img, p=0.3)
            mask = hflip(mask, p=0.3)
            return img, mask.float()

    return trainer_with(Rows())


@planted
def in_one_line_as_a_dictionary():
    class Rows(Images):
        def __getitem__(self, i):
            x, y = self.images[i], self.masks[i]
            x, y = hflip(x), hflip(y)
            return {"x": x, "y": y}

    return trainer_with(Rows())


@planted
def by_two_ifs():
    class Rows(Images):
        def __getitem__(self, i):
            img, mask = self.images[i], self.masks[i]
            if random.random() < 0.5:
                img = img.flip(-1)
            if random.random() < 0.5:
                mask = mask.flip(-1)
            return img, mask

    return trainer_with(Rows())


@planted
def by_two_conditions():
    class Rows(Images):
        def __getitem__(self, i):
            img, mask = self.images[i], self.masks[i]
            img = torch.rot90(img, 1, (1, 2)) if np.random.rand() < 0.5 else img
            mask = torch.rot90(mask, 1, (1, 2)) if np.random.rand() < 0.5 else mask
            return img, mask

    return trainer_with(Rows())


@planted
def by_a_method():
    class Rows(Images):
        def __getitem__(self, i):
            return self.crop(self.images[i]), self.crop(self.masks[i])

        def crop(self, x):
            top = torch.randint(0, 3, (1,)).item()
            return x[:, top : top + 4]

    return trainer_with(Rows())


@planted
def by_a_transform():
    class Turn(nn.Module):
        def forward(self, x):
            return torch.rot90(x, int(torch.randint(4, (1,))), (-2, -1))

    class Rows(Images):
        def __init__(self):
            super().__init__()
            self.transform = Turn()

        def __getitem__(self, i):
            image = self.transform(self.images[i])
            mask = self.transform(self.masks[i])
            return image, mask

    return trainer_with(Rows())


@planted
def by_an_object_with_a_call():
    class Flip:
        def __call__(self, x):
            return x.flip(-1) if torch.rand(1) < 0.5 else x

    class Rows(Images):
        def __init__(self):
            super().__init__()
            self.augment = Flip()

        def __getitem__(self, i):
            return self.augment(self.images[i]), self.augment(self.masks[i])

    return trainer_with(Rows())


@right
def both_in_one():
    class Rows(Images):
        def __getitem__(self, i):
            both = hflip(torch.stack([self.images[i], self.masks[i]]))
            return both[0], both[1]

    return trainer_with(Rows())


@right
def one_draw_for_both():
    class Rows(Images):
        def __getitem__(self, i):
            img, mask = self.images[i], self.masks[i]
            if random.random() < 0.5:
                img = img.flip(-1)
                mask = mask.flip(-1)
            return img, mask

    return trainer_with(Rows())


@right
def one_draw_for_two_ifs():
    class Rows(Images):
        def __getitem__(self, i):
            img, mask, turned = self.images[i], self.masks[i], random.random() < 0.5
            img = img.flip(-1) if turned else img
            mask = mask.flip(-1) if turned else mask
            return img, mask

    return trainer_with(Rows())


@right
def two_views_of_one_image():
    class Rows(Images):
        def __getitem__(self, i):
            return hflip(self.images[i]), hflip(self.images[i])

    return trainer_with(Rows())


@right
def two_views_of_one_mask():
    class Rows(Images):
        def __getitem__(self, i):
            mask = self.masks[i]
            return hflip(mask), hflip(mask)

    return trainer_with(Rows())


@right
def two_views_for_two_networks():
    class Rows(Images):
        def __getitem__(self, i):
            img = self.images[i]
            online = hflip(img)
            target = hflip(img)
            return online, target

    return trainer_with(Rows())


@right
def two_views_by_ifs():
    class Rows(Images):
        def __getitem__(self, i):
            online = target = self.images[i]
            if random.random() < 0.5:
                online = self.images[i].flip(-1)
            if random.random() < 0.5:
                target = self.images[i].flip(-1)
            return online, target

    return trainer_with(Rows())


@right
def functions_of_their_own():
    def shift_target(x):
        return x.roll(1, -1) if random.random() < 0.1 else x

    class Rows(Images):
        def __getitem__(self, i):
            img, target = hflip(self.images[i]), shift_target(self.masks[i])
            return img, target

    return trainer_with(Rows())


@right
def two_images():
    class Rows(Images):
        def __getitem__(self, i):
            j = random.randrange(len(self.images))
            return hflip(self.images[i]), hflip(self.images[j]), float(i == j)

    return trainer_with(Rows())


@right
def one_seed_for_both():
    class Rows(Images):
        def __getitem__(self, i):
            img, mask = self.images[i], self.masks[i]
            seed = random.randrange(1000)
            random.seed(seed)
            img = hflip(img)
            random.seed(seed)
            mask = hflip(mask)
            return img, mask

    return trainer_with(Rows())


@right
def noise_for_each():
    def noisy(x):
        return x + torch.randn_like(x) * 0.1 if random.random() < 0.5 else x

    class Rows(Images):
        def __getitem__(self, i):
            return noisy(self.images[i]), noisy(self.masks[i])

    return trainer_with(Rows())


@right
def the_image_alone():
    class Rows(Images):
        def __getitem__(self, i):
            img, label = self.images[i], self.masks[i].mean()
            return hflip(img), label

    return trainer_with(Rows())


@right
def a_draw_that_is_handed_on():
    def turned(x, k):
        return torch.rot90(x, k, (1, 2))

    class Rows(Images):
        def __getitem__(self, i):
            k = random.randint(0, 3)
            return turned(self.images[i], k), turned(self.masks[i], k)

    return trainer_with(Rows())


@right
def a_draw_that_is_kept():
    class Rows(Images):
        def turn(self, x, new):
            if new:
                self.k = random.randint(0, 3)
            return torch.rot90(x, self.k, (1, 2))

        def __getitem__(self, i):
            return self.turn(self.images[i], True), self.turn(self.masks[i], False)

    return trainer_with(Rows())


@pytest.mark.parametrize("make", planted, ids=lambda o: o.__name__)
def test_a_planted_mistake_is_found(make):
    assert "drawn_apart" in found_in(make())


@pytest.mark.parametrize("make", right, ids=lambda o: o.__name__)
def test_what_is_like_it_and_right_is_left_alone(make):
    assert found_in(make()) == []
