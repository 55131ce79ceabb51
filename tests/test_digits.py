"The built-in digits against scikit-learn's copy, and loader arguments that reach both loaders."
import numpy as np
from sklearn.datasets import load_digits as sklearn_digits

from isaac_loop.data import DataLoaders, load_digits


def test_every_stored_pixel_is_that_of_scikit_learn():
    digits, original = load_digits(), sklearn_digits()
    assert digits.num_rows == {"train": 1437, "test": 360}
    order = np.random.RandomState(0).permutation(1797)
    rows = [row for name in ("train", "test") for row in digits[name]]
    pixels = np.stack([np.rint(np.array(row["image"], dtype=float) * 16 / 255) for row in rows])
    assert (pixels == original.images[order]).all()
    assert [row["label"] for row in rows] == original.target[order].tolist()
    assert digits["train"].features["label"].names == [str(i) for i in range(10)]


def test_loader_arguments_reach_both_loaders():
    "ISA-96, ISA-97, ISA-100"
    rows = [{"x": float(i), "y": i} for i in range(10)]
    dls = DataLoaders.from_dataset_dict({"train": rows, "test": rows}, 4, num_workers=2, drop_last=True)
    assert (dls.train.num_workers, dls.valid.num_workers, dls.train.drop_last, dls.valid.batch_size) == (2, 2, True, 8)
    assert type(dls.train.sampler).__name__ == "RandomSampler" and type(dls.valid.sampler).__name__ == "SequentialSampler"


def test_rows_may_be_tuples_or_have_several_inputs():
    tuples = [(float(i), float(i), i) for i in range(6)]
    dls = DataLoaders.from_dataset_dict({"a": tuples, "b": tuples}, 3, train="b", valid="a", n_inp=2)
    assert len(next(iter(dls.train))) == 3 and dls.n_inp == 2
