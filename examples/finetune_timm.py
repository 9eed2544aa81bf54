"""Fine-tune a timm model with an injected complement on a folder of images (one sub-folder a class).

    python examples/finetune_timm.py IMAGES --model vit_small_patch16_224 --pretrained --out runs/finetuned

The complement starts as the identity, so the first loss is the plain model's. The new head and the branch are trained
first, with everything else frozen; then all of it.
"""

import argparse

import timm
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, random_split
from torchvision.datasets import ImageFolder

from oqc.integrations import inject, save, trainable


def epoch(model, loader, optimizer, device):
    model.train()
    total = 0.0
    for images, labels in loader:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    return total / len(loader.dataset)


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    right = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--size", type=int, help="of the images, where the model takes another than its own")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", default="runs/finetuned")
    args = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    size = {} if args.size is None else {"img_size": args.size}
    classes = len(ImageFolder(args.images).classes)
    model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=classes, **size).to(device)
    config = timm.data.resolve_data_config(size, model=model)
    steps = [timm.data.create_transform(**config, is_training=training) for training in (True, False)]
    augmented, plain = (ImageFolder(args.images, step) for step in steps)
    train, test = random_split(range(len(plain)), [0.8, 0.2], torch.Generator().manual_seed(0))
    loaders = [
        DataLoader(Subset(augmented, list(train)), args.batch, shuffle=True),
        DataLoader(Subset(plain, list(test)), args.batch),
    ]

    print(inject(model, "lowrank", rank=args.rank))
    optimizer = torch.optim.AdamW(trainable(model, also=model.get_classifier()), lr=1e-3)
    print(f"head and branch: loss {epoch(model, loaders[0], optimizer, device):.3f}")
    optimizer = torch.optim.AdamW(trainable(model, "all"), lr=1e-4, weight_decay=0.05)
    for i in range(args.epochs):
        print(f"epoch {i + 1}: loss {epoch(model, loaders[0], optimizer, device):.3f}", end="")
        print(f", test accuracy {100 * accuracy(model, loaders[1], device):.1f}%")
    save(model, args.out)
    print(f"saved to {args.out}; oqc.load({args.out!r}) gives it back")


if __name__ == "__main__":
    main()
