"""What distgpipe computes for exported models is what eager PyTorch computes on the same machine, to the last bit where that holds.

Bits depend on the processor, since libtorch chooses kernels by its instruction set. So PyTorch and distgpipe run here, one after
the other, with the same libtorch 2.11 and one thread. `make test-export` builds the programs.
"""

import copy
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings

import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python/tests")]
from architectures import MODELS, make, without_dropout  # noqa: E402
from distgpipe_export import export  # noqa: E402

BUILT = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug"
ROWS = 6


def run(program, *arguments):
    """Runs one of our programs. Fails with what it said."""
    found = BUILT / program
    assert found.is_file(), f"{found} is missing: run `make test-export`, which builds it"
    done = subprocess.run([str(found), *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{program} {' '.join(map(str, arguments))}: {done.stderr}"
    return done.stdout


class GlobalPool(nn.AdaptiveAvgPool2d):
    """An average of whole images as distgpipe computes it: where channels are last in memory, with another kernel, whose gradient
    has the layout of the image."""

    def forward(self, x):
        if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
            return F.avg_pool2d(x, x.shape[2:])
        return super().forward(x)


class Strided(nn.Conv2d):
    """A strided 1x1 convolution of few channels as distgpipe computes it: oneDNN's writes out of bounds on some processors."""

    def forward(self, x):
        return F.conv2d(x[:, :, ::self.stride[0], ::self.stride[1]], self.weight, self.bias, 1, 0, self.dilation, self.groups)


def as_distgpipe(model):
    """A copy that computes with the two kernels that distgpipe chooses otherwise than PyTorch."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1)):
            module.__class__ = GlobalPool
        if type(module) is nn.Conv2d and module.kernel_size == (1, 1) and max(module.stride) > 1 and module.in_channels < 8:
            module.__class__ = Strided
    return model


def sample(name):
    """A batch for each input of the model."""
    _, *inputs = MODELS[name]
    torch.manual_seed(1)
    batch = [torch.randint(0, below, [ROWS, *dims]) if below else torch.randn([ROWS, *dims]) for dims, below in inputs]
    for mask in batch[1:]:
        mask[:, 0] = 1  # a sentence has a token
    return tuple(batch)


def target_for(model, inputs):
    """Classes of samples or of tokens; a picture otherwise."""
    with torch.no_grad():
        output = copy.deepcopy(model)(*inputs)
    torch.manual_seed(2)
    if output.dim() == 4:
        return torch.randn_like(output)
    return torch.randint(0, output.shape[-1], output.shape[:-1])


def mean_loss(output, target):
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def summed_loss(output, target):
    """The same, with the sum over the tokens divided as distgpipe does: by all, whatever their micro-batch."""
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.transpose(1, -1), target, reduction="sum") / target.numel()


def eager(model, inputs, target, loss_of, program=None):
    """What PyTorch computes, under the names of examples/exported_model.rs: by the module, or by its export where that differs."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        found = {"evaluation": copy.deepcopy(model).eval()(*inputs)}
    model = model.train() if program is None else program.module()
    loss = loss_of(model(*inputs), target)
    loss.backward()
    found["loss"] = loss.detach()
    found.update((f"gradient/{name}", p.grad) for name, p in model.named_parameters() if p.grad is not None)
    # Of tied tensors, the first name.
    parameters = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    found.update((f"state/{name}", tensor) for name, tensor in model.state_dict().items() if name in parameters)
    return found


def save_batch(inputs, target, path):
    """Writes the tensors as `--data tensors` reads them."""
    names = ["input"] if len(inputs) == 1 else [f"input.{i}" for i in range(len(inputs))]
    save_file({**dict(zip(names, inputs)), "target": target}, path)


def computed(model, inputs, target):
    """What distgpipe computes for the export of a model."""
    with tempfile.TemporaryDirectory() as folder:
        archive, batch, out = (os.path.join(folder, name) for name in ("model.pt2", "batch.safetensors", "out.safetensors"))
        export(model, inputs, archive)
        save_batch(inputs, target, batch)
        run("examples/exported_model", archive, batch, out)
        return load_file(out)


def differences(expected, got):
    """Of each tensor with other bits: the largest difference, relative to its largest number."""
    gaps = {}
    for name, tensor in expected.items():
        other = got[name]
        # Losses are reported in float64.
        if not torch.equal(tensor.to(other.dtype) if name == "loss" else tensor, other.reshape(tensor.shape)):
            largest = tensor.double().abs().max().item()
            gaps[name] = (tensor.double() - other.double()).abs().max().item() / max(largest, 1e-30)
    return gaps


class Frozen(nn.Module):
    """A backbone that is not trained, whose batch norm and dropout are in a subgraph of the export."""

    def __init__(self, p):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(p), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


class Attention(nn.Module):
    def forward(self, x):
        split = x.unflatten(1, (3, 2, 8))
        y = F.scaled_dot_product_attention(*split.unbind(1), dropout_p=0.4 if self.training else 0.0)
        return y.flatten(1)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells = kind(6, 4, 2, batch_first=True, dropout=0.4)

    def forward(self, x):
        return self.cells(x.unflatten(1, (8, 6)))[0][:, -1]


# Their modules take another path through Python while they are exported, so their export has other bits than the module, in
# PyTorch too. Transformers repeats the keys and values of Llama otherwise then.
OTHER_PATH = {"llama"}

# Modules that draw random numbers in training, from 48 numbers.
RANDOM = {
    "dropout": lambda: nn.Dropout(0.4),
    "dropout1d": lambda: nn.Sequential(nn.Unflatten(1, (6, 8)), nn.Dropout1d(0.4), nn.Flatten()),
    "dropout2d": lambda: nn.Sequential(nn.Unflatten(1, (3, 4, 4)), nn.Dropout2d(0.4), nn.Flatten()),
    "alpha_dropout": lambda: nn.AlphaDropout(0.4),
    "feature_alpha_dropout": lambda: nn.Sequential(nn.Unflatten(1, (6, 8)), nn.FeatureAlphaDropout(0.4), nn.Flatten()),
    "rrelu": lambda: nn.RReLU(0.1, 0.9),
    "attention": Attention,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "depth_of_rows": lambda: torchvision.ops.StochasticDepth(0.4, "row"),
    "depth_of_batches": lambda: torchvision.ops.StochasticDepth(0.4, "batch"),
}


class Bits(unittest.TestCase):
    def setUp(self):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        # Evaluation of nn.MultiheadAttention has kernels of its own in PyTorch, which no graph of its training has.
        torch.backends.mha.set_fastpath_enabled(False)

    def tearDown(self):
        torch.backends.mha.set_fastpath_enabled(True)

    def assert_bits(self, expected, got):
        """Running statistics aside: distgpipe merges those of all micro-batches, which rounds once more."""
        self.assertEqual([name for name in expected if name not in got], [])
        gaps = differences(expected, got)
        merged = {name: gap for name, gap in gaps.items() if name.endswith((".running_mean", ".running_var"))}
        self.assertEqual({name: gap for name, gap in gaps.items() if name not in merged}, {}, "other bits")
        self.assertLess(max(merged.values(), default=0.0), 1e-6, merged)

    def test_every_architecture_has_the_bits_of_pytorch(self):
        for name in MODELS:
            with self.subTest(model=name):
                model, inputs = without_dropout(make(name)), sample(name)
                target = target_for(model, inputs)
                got = computed(model, inputs, target)
                program = export(model, inputs) if name in OTHER_PATH else None
                expected = eager(as_distgpipe(model), inputs, target, summed_loss, program)
                for tensor in expected:
                    if tensor.startswith("gradient/"):
                        self.assertGreater(expected[tensor].abs().max().item(), 0.0, f"{tensor} shows nothing")
                self.assert_bits(expected, got)
                # PyTorch with its own choice of kernels, and the mean of losses.
                torch.backends.mha.set_fastpath_enabled(True)
                gaps = differences(eager(model, inputs, target, mean_loss), got)
                torch.backends.mha.set_fastpath_enabled(False)
                furthest = max(gaps, key=gaps.get, default="none")
                print(f"{name}: {len(expected)} tensors, {len(gaps)} with other bits; largest difference {gaps.get(furthest, 0):.1e}, {furthest}")
                self.assertLess(gaps.get(furthest, 0.0), 5e-6, furthest)

    def test_evaluation_of_the_training_graph_has_the_bits_of_pytorchs_evaluation(self):
        for name in MODELS:
            with self.subTest(model=name):
                model, inputs = make(name), sample(name)
                got = computed(model, inputs, target_for(model, inputs))["evaluation"]
                with torch.no_grad():
                    expected = as_distgpipe(model).eval()(*inputs)
                self.assertEqual(differences({"evaluation": expected}, {"evaluation": got}), {})

    def test_modules_that_draw_random_numbers_draw_none_in_evaluation(self):
        for name, kind in RANDOM.items():
            with self.subTest(module=name):
                torch.manual_seed(0)
                module = kind()
                width = 16 if name == "attention" else 4 if isinstance(module, Recurrent) else 48
                model = nn.Sequential(nn.Linear(48, 48), module, nn.Linear(width, 3))
                x = torch.randn(ROWS, 48)
                got = computed(model, (x,), torch.arange(ROWS) % 3)
                with torch.no_grad():
                    expected = copy.deepcopy(model).eval()(x)
                    # What would be computed with random numbers is something else.
                    self.assertFalse(torch.equal(model.train()(x), expected))
                self.assertEqual(differences({"evaluation": expected}, {"evaluation": got["evaluation"]}), {})

    def test_a_frozen_backbone_has_the_bits_of_pytorch(self):
        torch.manual_seed(0)
        model, inputs = Frozen(0.0), (torch.randn(ROWS, 3),)
        target = torch.arange(ROWS) % 2
        got = computed(model, inputs, target)
        self.assert_bits(eager(model, inputs, target, summed_loss), got)
        self.assertEqual([name for name in got if name.startswith("gradient/backbone") and got[name].abs().max() > 0], [])
        self.assertEqual(got["state/backbone.1.num_batches_tracked"].item(), 1)

    def test_saved_weights_load_into_the_module(self):
        masked = ["--cut", "after=model.roberta.embeddings,model.roberta.encoder.layer.0"]
        for name, flags in [("mobilenet_v2", []), ("gpt2", []), ("gpt2", ["--cut", "first=1,last=1"]), ("roberta_masked", masked)]:
            with self.subTest(model=name, flags=flags), tempfile.TemporaryDirectory() as folder:
                model, inputs = without_dropout(make(name)), sample(name)
                archive, batch, saved = (os.path.join(folder, file) for file in ("model.pt2", "batch.safetensors", "mine.safetensors"))
                export(model, inputs, archive)
                target = target_for(model, inputs)
                save_batch(inputs, target, batch)
                data = ["--data", "tensors", "--data-dir", batch, "--batch", "4", "--device", "cpu"]
                run("distgpipe", "train", "--model", archive, *data, "--steps", "2", "--chunks", "1", "--no-evaluate", "--save", saved, *flags)
                before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
                tensors = load_file(saved)
                self.assertEqual(tensors.keys(), before.keys())
                model.load_state_dict(tensors)
                after = model.state_dict()
                self.assertTrue(all(torch.equal(after[key], tensors[key]) for key in tensors))
                trained = [key for key, parameter in model.named_parameters() if not torch.equal(parameter, before[key])]
                self.assertEqual(len(trained), len(list(model.named_parameters())), "every parameter has been trained")
                if name == "gpt2":
                    self.assertIs(model.model.lm_head.weight, model.model.transformer.wte.weight)
                # The module computes with them what distgpipe does.
                again, out = os.path.join(folder, "again.pt2"), os.path.join(folder, "out.safetensors")
                export(model, inputs, again)
                run("examples/exported_model", again, batch, out)
                with torch.no_grad():
                    expected = as_distgpipe(model).eval()(*inputs)
                self.assertEqual(differences({"evaluation": expected}, {"evaluation": load_file(out)["evaluation"]}), {})


if __name__ == "__main__":
    unittest.main()
