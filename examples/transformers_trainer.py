"""Fine-tune a transformers model with an injected complement through transformers' Trainer.

    python examples/transformers_trainer.py IMAGES --model google/vit-base-patch16-224-in21k --out runs/trainer

IMAGES has one sub-folder a class. Without --model a small ViT is trained from its start. What Trainer saves keeps the
branch and the injection; `oqc.integrations.transformers.from_pretrained` builds the model again.
"""

import argparse

import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from oqc.integrations import inject
from oqc.integrations.transformers import from_pretrained


def make_model(name, classes, size):
    if name is not None:
        return ViTForImageClassification.from_pretrained(name, num_labels=classes, ignore_mismatched_sizes=True)
    config = ViTConfig(
        image_size=size,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=classes,
    )
    return ViTForImageClassification(config)


def collate(batch):
    return {"pixel_values": torch.stack([x for x, _ in batch]), "labels": torch.tensor([y for _, y in batch])}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images")
    parser.add_argument("--model")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", default="runs/trainer")
    args = parser.parse_args(arguments)

    steps = [
        transforms.Resize((args.size, args.size)),
        transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.5] * 3),
    ]
    data = ImageFolder(args.images, transforms.Compose(steps))
    model = make_model(args.model, len(data.classes), args.size)
    print(inject(model, "lowrank", rank=args.rank))
    settings = TrainingArguments(
        output_dir=args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-4,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=data, data_collator=collate)
    result = trainer.train()
    trainer.save_model(args.out)
    print(f"loss {result.training_loss:.3f}; saved to {args.out}")
    return from_pretrained(args.out)


if __name__ == "__main__":
    main()
