"""The bits of torchvision's models at their full width and depth, with small images; the tests have tiny versions.

usage: whole_models.py [NAME...]      needs what `make test-export` installs and builds; takes minutes and 7 GB

Prints a line for each model, and exits with 1 if one has other bits than PyTorch, running statistics aside.
"""

import logging
import sys
import time
import warnings

import torch
import torchvision
from test_bits import ROWS, as_distgpipe, computed, differences, eager, summed_loss, target_for, without_dropout

MODELS = {
    "resnet18": {},
    "mobilenet_v2": {},
    "efficientnet_b0": {},
    "densenet121": {},
    "convnext_tiny": {},
    "swin_t": {},
    "vit_b_16": {"image_size": 64},
}


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # Evaluation of nn.MultiheadAttention has kernels of its own in PyTorch, which no graph of its training has.
    torch.backends.mha.set_fastpath_enabled(False)
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {torch.backends.cpu.get_cpu_capability()}; {ROWS} images of 64x64")
    failed = False
    for name in sys.argv[1:] or MODELS:
        start = time.monotonic()
        torch.manual_seed(0)
        model = without_dropout(torchvision.models.get_model(name, num_classes=10, **MODELS[name]))
        for module in model.modules():
            if isinstance(module, torchvision.ops.StochasticDepth):
                module.p = 0.0
        inputs = (torch.randn(ROWS, 3, 64, 64),)
        target = target_for(model, inputs)
        got = computed(model, inputs, target)
        expected = eager(as_distgpipe(model), inputs, target, summed_loss)
        missing = [tensor for tensor in expected if tensor not in got]
        gaps = differences(expected, {**expected, **got})
        merged = {tensor: gap for tensor, gap in gaps.items() if tensor.endswith((".running_mean", ".running_var"))}
        other = {tensor: gap for tensor, gap in gaps.items() if tensor not in merged}
        failed |= bool(missing or other) or max(merged.values(), default=0.0) > 1e-6
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: {parameters:,} parameters, {len(expected)} tensors compared, {len(other)} with other bits, {len(missing)} missing; "
              f"running statistics differ by at most {max(merged.values(), default=0.0):.1e}; {time.monotonic() - start:.0f} s", flush=True)
        for tensor, gap in sorted(other.items(), key=lambda item: -item[1])[:5]:
            print(f"    {tensor}: {gap:.1e}")
    sys.exit(failed)


main()
