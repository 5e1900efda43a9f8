"""The architectures that the tests compare with PyTorch, with tiny widths."""

import copy

import torch
import torch.nn.functional as F
import torchvision.models as vision
from torch import nn


class ResNet18(vision.ResNet):
    """torchvision's ResNet-18 with four channels instead of 64 in its first stage."""

    def __init__(self):
        super().__init__(vision.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
        self.inplanes = 4
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4)
        for stage, (channels, stride) in enumerate([(4, 1), (8, 2), (8, 2), (16, 2)], 1):
            setattr(self, f"layer{stage}", self._make_layer(vision.resnet.BasicBlock, channels, 2, stride))
        self.fc = nn.Linear(16, 10)


def digits():
    """A network for the digits that come with distgpipe."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            return x + self.act(self.norm(self.conv(x)))

    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Block(), Block()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(1))


class Double(nn.Sequential):
    def __init__(self, before, after):
        super().__init__(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.bottom = Double(3, 8), Double(8, 16), Double(16, 16)
        self.grow, self.widen = nn.ConvTranspose2d(16, 16, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear")
        self.up2, self.up1, self.out = Double(32, 8), Double(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.up2(torch.cat([self.grow(self.bottom(F.max_pool2d(b, 2))), b], 1))
        return self.out(self.up1(torch.cat([self.widen(y), a], 1)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        rows, tokens, width = x.shape
        split = self.qkv(self.ln1(x)).split(width, 2)
        q, k, v = (part.view(rows, tokens, self.heads, width // self.heads).transpose(1, 2) for part in split)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(rows, tokens, width)
        x = x + self.proj(y)
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary=256, tokens=8, width=16):
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width), nn.Dropout(0.1)
        self.h = nn.ModuleList(Block(width, 2) for _ in range(2))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        y = self.drop(self.wte(x) + self.wpe(torch.arange(x.size(1), device=x.device)))
        for block in self.h:
            y = block(y)
        return self.head(self.ln(y))


class Logits(nn.Module):
    """A Hugging Face model that returns its logits alone."""

    def __init__(self, model, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, ids):
        return self.model(ids, **self.options).logits


class MaskedLogits(Logits):
    """One that is told which tokens are padding, as docs/models.md shows."""

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask, **self.options).logits


def roberta():
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                           max_position_embeddings=12, num_labels=3)
    return Logits(RobertaForSequenceClassification(config))


def roberta_masked():
    """One for pairs of sentences, in the tokens of crates/distgpipe/tests/golden/tokenizer."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(vocab_size=400, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                           max_position_embeddings=34, num_labels=2)
    return MaskedLogits(RobertaForSequenceClassification(config))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2)), use_cache=False)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=8)
    return Logits(LlamaForCausalLM(config), use_cache=False)


def efficientnet():
    blocks = vision.efficientnet.MBConvConfig
    return vision.EfficientNet([blocks(1, 3, 1, 8, 8, 1), blocks(6, 3, 2, 8, 16, 2)], 0.2, stochastic_depth_prob=0.2, num_classes=5)


def convnext():
    blocks = vision.convnext.CNBlockConfig
    return vision.ConvNeXt([blocks(8, 16, 2), blocks(16, None, 1)], stochastic_depth_prob=0.1, num_classes=5)


# Name: (how to make it, and for each input the dimensions of a sample and the number that its integers are below; 0 for floats)
MODELS = {
    "digits": (digits, ([1, 8, 8], 0)),
    "mobilenet_v2": (lambda: vision.MobileNetV2(10, 0.25, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2]], 8), ([3, 32, 32], 0)),
    "resnet18": (ResNet18, ([3, 64, 64], 0)),
    "vit": (lambda: vision.VisionTransformer(16, 4, 2, 2, 16, 32, 0.1, 0.1, 5), ([3, 16, 16], 0)),
    "convnext": (convnext, ([3, 32, 32], 0)),
    "efficientnet": (efficientnet, ([3, 32, 32], 0)),
    "swin": (lambda: vision.SwinTransformer([4, 4], 8, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.1, num_classes=5), ([3, 32, 32], 0)),
    "densenet": (lambda: vision.DenseNet(4, (2, 2), 8, num_classes=5), ([3, 32, 32], 0)),
    "unet": (UNet, ([3, 16, 16], 0)),
    "lstm": (Lstm, ([6], 20)),
    "encoder": (Encoder, ([6], 30)),
    "gpt": (Gpt, ([8], 256)),
    "roberta": (roberta, ([8], 40)),
    "roberta_masked": (roberta_masked, ([32], 400), ([32], 2)),
    "gpt2": (gpt2, ([8], 40)),
    "llama": (llama, ([8], 40)),
}


def make(name):
    """The model, the same in every process. Weights whose first value hides errors get another one: a zero would make all
    gradients before it zero, and a scale of 1e-6 makes them as small."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            if parameter == "heads.head.weight":
                tensor.normal_(0, 0.3)
            elif parameter == "heads.head.bias":
                tensor.normal_(0, 0.1)
            elif parameter.endswith("layer_scale"):
                tensor.fill_(0.5)
    return model


def without_dropout(model):
    """A copy without random numbers."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "attn_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
