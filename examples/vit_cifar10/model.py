"""Vision transformers for CIFAR-10: `vit`, ImageNet's ViT-B/16 with a new classifier; `medium` and `small`, from random weights."""

import torch
import torchvision


def vit():
    model = torchvision.models.vit_b_16(weights="DEFAULT")
    model.heads.head = torch.nn.Linear(768, 10)
    return model


def medium(classes=10):
    torch.manual_seed(0)
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=4, num_layers=8, num_heads=4, hidden_dim=192, mlp_dim=768, num_classes=classes)


def medium_100():
    return medium(100)


def small():
    torch.manual_seed(0)
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=4, num_layers=4, num_heads=4, hidden_dim=96, mlp_dim=192, dropout=0.1, num_classes=10)
