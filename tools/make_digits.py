"""Write `isaac_loop/data/digits-*.parquet` from the copy of the handwritten digits that scikit-learn ships.

Run once; `tests/data/test_data.py` compares every stored pixel with scikit-learn's. Grey values 0 to 16 are
stretched to 0 to 255, as image viewers expect, and can be taken back exactly. The split is random with a
fixed seed.
"""

import sys
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from sklearn.datasets import load_digits

N_TRAIN = 1437


def main():
    "Write both files into the folder given, or into the package"
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "isaac_loop" / "data")
    digits = load_digits()
    pixels = np.rint(digits.images * 255 / 16).astype("uint8")
    order = np.random.RandomState(0).permutation(len(pixels))
    features = Features({"image": Image(mode="L"), "label": ClassLabel(names=[str(i) for i in range(10)])})
    for name, rows in (("train", order[:N_TRAIN]), ("test", order[N_TRAIN:])):
        images = [PILImage.fromarray(pixels[i]) for i in rows]
        Dataset.from_dict(
            {"image": images, "label": digits.target[rows].tolist()}, features=features
        ).to_parquet(folder / f"digits-{name}.parquet")


if __name__ == "__main__":
    main()
