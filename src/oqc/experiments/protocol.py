"""How the runs of the suites are trained: one place, the same for every model that is compared.

CIFAR-100: the paper gives AdamW, learning rate 2e-3, weight decay 0.05, batch 512, a short warmup and cosine decay, but
neither epochs nor augmentation. Crop and flip, five epochs of warmup and clipping at 1.0 are our choice from the
start. The number of epochs is calibrated on the AFBO+PR baseline alone: the shortest schedule tried whose mean best
test accuracy is within 0.5 of the published 64.25 (`oqc reproduce calibration`: 45 and 50 epochs miss it, 60 match). No
result of a complement entered that rule, and test accuracy is used for no other choice. Frozen since: whoever wants
another schedule passes `--epochs` and a results folder of its own.
"""

from __future__ import annotations

from dataclasses import replace

from oqc.config import Data, Train

CIFAR100_DATA = Data(name="cifar100", crop=4, flip=True)
CIFAR100_TRAIN = Train(
    epochs=60, batch=512, lr=2e-3, weight_decay=0.05, warmup=5.0, clip=1.0, smoothing=0.0, precision="bf16"
)

# The readout pilot on ViT-Tiny: the paper says nothing of its training, and its level (24%) is far from ours. The
# schedule is the one above, so that only the difference of its two rows is to be read.
VIT_TINY_TRAIN = CIFAR100_TRAIN

# Tiny ImageNet (table 2): batch 128 is the paper's, the rest as above.
TINY_IMAGENET_DATA = Data(name="tiny-imagenet", crop=4, flip=True)
TINY_IMAGENET_TRAIN = replace(CIFAR100_TRAIN, batch=128)

# The demo and the suites on scikit-learn's digits: no crop and no flip, for digits fill the image and mean something
# else mirrored.
DIGITS_DATA = Data(name="digits", crop=0, flip=False)
DIGITS_TRAIN = Train(epochs=12, batch=48, lr=2e-3, warmup=2.0, precision="fp32", mode="eager")
