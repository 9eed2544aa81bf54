"""Fine-tune a timm model with an injected complement on a folder of images (one sub-folder a class).

    python examples/finetune_timm.py IMAGES --model vit_small_patch16_224 --pretrained --out runs/finetuned

The complement starts as the identity, so the first loss is the plain model's. The new head and the branch are trained
first, with everything else frozen; then all of it.
"""

import argparse

import timm
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
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
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", default="runs/finetuned")
    args = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    data = ImageFolder(args.images)
    model = timm.create_model(
        args.model, pretrained=args.pretrained, num_classes=len(data.classes), img_size=args.size
    ).to(device)
    data.transform = timm.data.create_transform(**timm.data.resolve_data_config({"img_size": args.size}, model=model))
    train, test = torch.utils.data.random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    loaders = [DataLoader(part, args.batch, shuffle=part is train) for part in (train, test)]

    print(inject(model, "lowrank", rank=args.rank))
    new = [*trainable(model, "complement"), *model.get_classifier().requires_grad_().parameters()]
    print(f"head and branch: loss {epoch(model, loaders[0], torch.optim.AdamW(new, lr=1e-3), device):.3f}")
    optimizer = torch.optim.AdamW(trainable(model, "all"), lr=1e-4, weight_decay=0.05)
    for i in range(args.epochs):
        print(f"epoch {i + 1}: loss {epoch(model, loaders[0], optimizer, device):.3f}", end="")
        print(f", test accuracy {100 * accuracy(model, loaders[1], device):.1f}%")
    save(model, args.out)
    print(f"saved to {args.out}; oqc.integrations.load({args.out!r}) gives it back")


if __name__ == "__main__":
    main()
