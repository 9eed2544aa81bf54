"""A timm model with an injected complement as a Lightning module, which trains the branch and the head.

python examples/lightning_module.py IMAGES --model vit_small_patch16_224 --pretrained --out runs/lightning
"""

import argparse

import lightning
import timm
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from oqc.integrations import inject, save, trainable


class Complemented(lightning.LightningModule):
    """Frozen backbone, trained complement and head."""

    def __init__(self, name, classes, size, *, pretrained=False, rank=32, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        sizes = {} if size is None else {"img_size": size}
        self.model = timm.create_model(name, pretrained=pretrained, num_classes=classes, **sizes)
        inject(self.model, "lowrank", rank=rank)
        trainable(self.model, also=self.model.get_classifier())

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(parameters, lr=self.hparams.lr, weight_decay=0.0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--size", type=int, help="of the images, where the model takes another than its own")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", default="runs/lightning")
    args = parser.parse_args(arguments)

    lightning.seed_everything(0)
    data = ImageFolder(args.images)
    module = Complemented(args.model, len(data.classes), args.size, pretrained=args.pretrained)
    config = timm.data.resolve_data_config({"img_size": args.size} if args.size else {}, model=module.model)
    data.transform = timm.data.create_transform(**config, is_training=True)
    trainer = lightning.Trainer(
        max_epochs=args.epochs, default_root_dir=args.out, logger=False, enable_checkpointing=False, log_every_n_steps=1
    )
    trainer.fit(module, DataLoader(data, args.batch, shuffle=True))
    save(module.model, args.out)
    print(f"loss {trainer.callback_metrics['loss']:.3f}; saved to {args.out}")
    return module


if __name__ == "__main__":
    main()
