"""The command line: python3 -m distgpipe_export FILE.py:NAME --input SHAPE."""

import argparse
import importlib
import importlib.util
import inspect
import pathlib
import sys
import warnings

import torch

from . import ExportError, Unseen, export

ROWS = 4


def load(text):
    """The module that FILE.py:NAME or PACKAGE.MODULE:NAME stands for. A function or class is called without arguments."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ExportError(f"expected FILE.py:NAME, got {text}")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(pathlib.Path(place).stem, place)
        if spec is None or not pathlib.Path(place).is_file():
            raise ExportError(f"{place}: no such file")
        source = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = source
        spec.loader.exec_module(source)
    else:
        try:
            source = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ExportError(f"{place}: {error}; expected FILE.py or a module that Python finds") from error
    try:
        found = getattr(source, name)
    except AttributeError as error:
        raise ExportError(f"{place} has no {name}") from error
    if not isinstance(found, torch.nn.Module) and callable(found):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ExportError(f"{name}: {error}; expected a module, or a function or class that makes one without arguments") from error
        found = found()
    if not isinstance(found, torch.nn.Module):
        raise ExportError(f"expected {name} to be a torch.nn.Module, or to return one, got {type(found).__name__}")
    return found


def example(text):
    """Example rows for 3,224,224 (floats), or 128:int64<1000 (integers below 1000)."""
    shape, _, kind = text.partition(":")
    try:
        size = [ROWS, *(int(n) for n in shape.split(",") if n)]
        if min(size) < 1:
            raise ValueError
        if not kind:
            return torch.randn(size)
        name, _, below = kind.partition("<")
        if name != "int64" or int(below or 2) < 1:
            raise ValueError
        return torch.randint(0, int(below or 2), size)
    except ValueError as error:
        raise ExportError(f"--input {text}: expected sizes without the batch, such as 3,224,224, or 128:int64<1000 for "
                          "integers below 1000, in quotes") from error


def main():
    parser = argparse.ArgumentParser(prog="python3 -m distgpipe_export", description="Exports a PyTorch module for distgpipe.")
    parser.add_argument("model", metavar="FILE.py:NAME", help="a module, or a function or class that makes one")
    parser.add_argument("--input", action="append", required=True, metavar="SHAPE",
                        help="sizes of one sample, such as 3,224,224 or 128:int64<1000; once per input")
    parser.add_argument("--output", metavar="FILE.pt2", help="the file to write [default: the name of the file, or of the model]")
    parser.add_argument("--allow-op", action="append", default=[], metavar="NAME",
                        help="an operator outside of distgpipe's list that distgpipe will be told to allow, such as erfinv.default")
    parser.add_argument("--seed", type=int, default=0, help="seeds the weights, where making the model draws them [default: 0]")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    place, _, name = arguments.model.rpartition(":")
    output = arguments.output or (pathlib.Path(place).stem if place.endswith(".py") else name) + ".pt2"
    try:
        if not output.endswith(".pt2"):
            raise ExportError(f"--output {output}: expected a name that ends in .pt2")
        if not pathlib.Path(output).absolute().parent.is_dir():
            raise ExportError(f"--output {output}: no such directory")
        model = load(arguments.model)
        with warnings.catch_warnings(record=True) as noticed:
            warnings.simplefilter("always", Unseen)
            export(model, tuple(example(text) for text in arguments.input), output, arguments.allow_op)
    except ExportError as error:
        sys.exit(f"error: {error}")
    count = sum(p.numel() for p in model.parameters())
    for notice in noticed:
        print(f"warning: {notice.message}", file=sys.stderr)
    print(f"wrote {output}: {count:,} parameters; loss, gradients and evaluation output equal the module's")


main()
