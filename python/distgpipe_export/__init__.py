"""Exports a PyTorch module for distgpipe, after comparing the export with the module itself.

    python3 -m distgpipe_export my.py:model --input 3,224,224        # writes my.pt2

From Python: distgpipe_export.export(model, inputs, "my.pt2").
"""

import copy
import pathlib
import warnings

import torch

VERSION = "2.11."

# The arguments that say whether an operator is in training, as distgpipe changes them for evaluation.
SWITCHES = {"train": False, "training": False, "dropout_p": 0.0}


# The operators that distgpipe runs without `--allow-op`, as in crates/distgpipe-core/src/pt2/operators.rs.
OPERATORS = frozenset((pathlib.Path(__file__).parent / "operators.txt").read_text().split())


# Weights up to this size count as zero, such as a zero-initialised head or a LayerScale of 1e-6: they hide what is behind them.
TINY = 1e-3

# The difference between two tensors that rounding explains, relative to the largest number, or to 1 if that is larger.
ROUNDING = 1e-6


class ExportError(Exception):
    """The module cannot be exported; the text says why and what to do."""


class Unseen(UserWarning):
    """The comparison of the export with the module shows nothing of some parameters."""


def export(model, inputs, path=None, allowed=()):
    """Exports `model` for training, with a batch of any size, and writes it to `path`.

    `inputs` is a tuple of example tensors of at least two rows. `allowed` names operators outside of the list, such as
    "erfinv.default", that distgpipe will be told to allow. Raises ExportError if the module cannot be exported, if distgpipe
    would refuse the export, or if the export does not compute what the module computes. Warns of parameters whose gradients show
    nothing, whatever the weights are. Returns the exported program.
    """
    if not torch.__version__.startswith(VERSION):
        raise ExportError(f"expected PyTorch {VERSION}x, got {torch.__version__}: pip install torch==2.11.0")
    if any(x.shape[:1] != inputs[0].shape[:1] or x.shape[0] < 2 for x in inputs):
        raise ExportError("expected inputs with the same number of rows, at least two, in their first dimension")
    model = copy.deepcopy(model).train()
    check_modules(model)
    check_forward(model, inputs)
    batch = tuple({0: torch.export.Dim("batch", min=2)} for _ in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(model, inputs, dynamic_shapes=(batch,) if takes_arguments(model) else batch)
        except Exception as error:  # torch.export raises errors of many kinds
            raise ExportError(f"torch.export cannot export the module: {explained(error)}") from error
        check_shapes(program)
        check_operators(program, allowed)
        silent = compare(model, program, inputs)
    if silent:
        warnings.warn(f"nothing was compared of the gradients of {', '.join(silent)}: they are zero, or not finite, in the module and "
                      "in the export, also with other numbers in place of the weights that are zero (as for biases before a batch norm or "
                      "of attention's keys, which change nothing, and for parameters that forward does not use)", Unseen, stacklevel=2)
    for graph_module in graph_modules(program):
        for node in graph_module.graph.nodes:
            node.meta.pop("stack_trace", None)
    program.example_inputs = None  # they may be private data, and nothing needs them
    if path is not None:
        torch.export.save(program, path, extra_files={"distgpipe_export": "compared"})
    return program


def takes_arguments(model):
    """Whether forward takes *args: then the dynamic shapes of all of them are one tuple."""
    import inspect

    return any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values())


def graph_modules(program):
    """The graph of the program and its subgraphs, such as those of no_grad."""
    return [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]


def check_modules(model):
    """Fails if a module keeps what distgpipe does not: other statistics than a batch norm's, or parameters of another type."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.modules.batchnorm._NormBase) or not module.track_running_stats:
            continue
        if isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
            raise ExportError(f"{name} is an instance norm with running statistics, and distgpipe keeps those of batch norms only: "
                              "set track_running_stats=False")
        if module.momentum is None:
            raise ExportError(f"{name} has momentum=None, whose average depends on the number of batches seen: give it a number, such as 0.1")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ExportError(f"{name} is of {parameter.dtype}, and distgpipe trains parameters of torch.float32: export "
                              "model.float(), and train with --precision bf16")


def check_forward(model, inputs):
    """Fails unless forward takes the inputs, returns a tensor with a row for each of theirs, and changes no buffer but a batch norm's."""
    model = copy.deepcopy(model)
    norms = tuple(name for name, module in model.named_modules() if isinstance(module, torch.nn.modules.batchnorm._NormBase))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        output = model(*inputs)
    except Exception as error:  # whatever the user's module raises
        shapes = ", ".join(f"{list(x.shape)} of {x.dtype}" for x in inputs)
        raise ExportError(f"forward fails with inputs of {shapes}: {first_line(error)}") from error
    if not isinstance(output, torch.Tensor):
        raise ExportError(f"expected one tensor as output, got {type(output).__name__}: wrap the module in one whose forward "
                          "returns the tensor that the loss takes, such as `return self.model(x).logits`")
    if output.shape[:1] != inputs[0].shape[:1]:
        raise ExportError(f"expected an output with {len(inputs[0])} rows for as many rows of input, got {list(output.shape)}: "
                          "keep the first dimension as it is")
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[0] not in norms and not torch.equal(before[name], buffer):
            raise ExportError(f"forward changes the buffer {name}: only batch norms may change buffers; change it outside of forward")


def check_shapes(program):
    """Fails if a shape or a number depends on the values of a tensor."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for graph_module in graph_modules(program):
        for node in graph_module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
                raise ExportError(f"the shape of {node.name} in {place(node)} depends on the values of a tensor; "
                                  "compute it with torch.where or masks")
            if isinstance(value, (torch.SymInt, torch.SymFloat)) and free_unbacked_symbols(value):
                raise ExportError(f"the number {node.name} in {place(node)} depends on the values of a tensor; keep it a tensor, "
                                  "without .item()")


def place(node):
    """The module of the user's that a node belongs to."""
    return ([path for path, _ in node.meta.get("nn_module_stack", {}).values()] or [""])[-1] or "the module itself"


def check_operators(program, allowed):
    """Fails if the graph has what distgpipe refuses: subgraphs other than those of no_grad, and operators outside of its list."""
    for graph_module in graph_modules(program):
        for node in graph_module.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.HigherOrderOperator) and target.name() != "wrap_with_set_grad_enabled":
                autocast = target.name() == "wrap_with_autocast"
                remedy = "leave torch.autocast out, and train with --precision bf16" if autocast else "use operators alone"
                raise ExportError(f"{place(node)} uses {target.name()}, which distgpipe does not run: {remedy}")
            if not isinstance(target, torch._ops.OpOverload) or not computes(node):
                continue
            name = str(target).removeprefix("aten.")
            if name not in OPERATORS and name not in allowed:
                remedy = ("use operators of PyTorch" if target.namespace != "aten" else "use another one, or allow it with "
                          f"--allow-op {name}, in the exporter and in distgpipe, if it computes new tensors from tensors and numbers")
                raise ExportError(f"{place(node)} uses the operator {target}, which is not on distgpipe's list: {remedy}")


def computes(node):
    """Whether a node computes tensors, rather than sizes or assertions."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value))


def compare(model, program, inputs):
    """Compares loss, gradients, buffers and evaluation output of the export with those of the module, also with other numbers in
    place of weights that are zero. Returns the parameters whose gradients show nothing even then."""
    more = tuple(torch.cat([x, x[:1]]) for x in inputs)  # another number of rows than the export has seen
    evaluated = copy.deepcopy(program)
    for graph_module in graph_modules(evaluated):
        switch_to_evaluation(graph_module)
    # All gradients in front of a zero-initialised head are zero, and any two graphs would agree on them.
    visible = perturbed(model)
    seen = set()
    for module, rows in ((model, inputs), (model, more), (visible, inputs), (visible, more)):
        own, exported = copy.deepcopy(module), copy.deepcopy(program).module()
        if module is visible:  # otherwise the export's own weights, which are compared, too
            set_weights(exported, module)
        expected, got = trained(own, rows), trained(exported, rows)
        for name in sorted(expected.keys() | got.keys()):
            same(name, expected.get(name), got.get(name))
        seen.update(name for name, tensor in expected.items() if shows_something(tensor))
    for module in (model, visible):
        exported = copy.deepcopy(evaluated).module()
        if module is visible:
            set_weights(exported, module)
        with torch.no_grad():
            same("the output in evaluation", copy.deepcopy(module).eval()(*inputs), exported(*inputs), 1e-5)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and gradient_of(name) not in seen]


def perturbed(model):
    """A copy with other numbers in place of those that are nearly zero: the same in every call, and as large as usual weights."""
    model = copy.deepcopy(model)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else 1
            numbers = torch.rand(parameter.shape, generator=random).to(parameter) * 0.4 + 0.1
            signs = torch.randint(0, 2, parameter.shape, generator=random).to(parameter) * 2 - 1
            parameter.copy_(torch.where(parameter.abs() > TINY, parameter, numbers * signs / fan_in ** 0.5))
    return model


def set_weights(exported, model):
    """Gives the module of an export the parameters of `model`."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in exported.named_parameters():
            parameter.copy_(weights[name])


def shows_something(tensor):
    """Whether a tensor is more than rounding, and finite: two others are equal whatever a graph has lost."""
    return bool(tensor.numel() and tensor.isfinite().all() and tensor.abs().max() > ROUNDING)


def gradient_of(name):
    return f"the gradient of {name}"


def trained(module, inputs):
    """The loss of one step, its gradients, and the buffers after it."""
    torch.manual_seed(0)
    output = module(*inputs)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    loss = (output.float() * weights).sum()
    loss.backward()
    found = {"the loss": loss.detach()}
    found.update((gradient_of(name), p.grad) for name, p in module.named_parameters() if p.grad is not None)
    found.update((f"the buffer {name}", b) for name, b in module.named_buffers() if name in module.state_dict())
    return found


def same(what, expected, got, relative=ROUNDING):
    """Fails unless both tensors are equal but for rounding."""
    remedy = "the export would train another model, so nothing was written"
    if expected is None or got is None:
        side = "the export" if got is None else "the module"
        raise ExportError(f"{what} is missing in {side}: {remedy}; a custom autograd.Function loses its backward pass in an "
                          "export: write it with PyTorch's operators")
    close = torch.allclose(expected.double(), got.double(), rtol=relative * 100, equal_nan=True,
                           atol=relative * max(1.0, expected.double().abs().nan_to_num().max().item() if expected.numel() else 0))
    if not close:
        difference = (expected.double() - got.double()).abs().max().item()
        raise ExportError(f"{what} differs from the module's by up to {difference:.3g}: {remedy}; forward may draw random "
                          "numbers, or act differently in evaluation, in a way that an export cannot express")


def switch_to_evaluation(graph_module):
    """Changes the arguments that say whether an operator is in training, as distgpipe does."""
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        for name, value in SWITCHES.items():
            at = names.index(name) if name in names else None
            statistics = "running_mean" in names and node.args[names.index("running_mean")] is None
            if at is not None and not statistics and (at < len(node.args) or name in node.kwargs):
                if at < len(node.args):
                    node.update_arg(at, value)
                else:
                    node.update_kwarg(name, value)
        if node.target is torch.ops.aten.bernoulli_.float:  # stochastic depth: its mean
            node.target, node.args = torch.ops.aten.fill_.Scalar, node.args[:2]
        if node.target is torch.ops.aten.add_.Tensor and "num_batches_tracked" in str(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def explained(error):
    """The first line of torch.export's error, with what to do about the common ones."""
    text, first = str(error).strip(), first_line(error)
    # The text of an error about values may speak of specialized sizes too.
    hints = {
        "data-dependent": "a branch or shape depends on the values of a tensor; compute it with torch.where or masks",
        "data dependent": "a branch or shape depends on the values of a tensor; compute it with torch.where or masks",
        "specialized": "a shape depends on the size of the batch; keep the first dimension as it is",
        "Constraints violated": "a shape depends on the size of the batch; keep the first dimension as it is",
    }
    hint = next((hint for sign, hint in hints.items() if sign in text), None)
    return first if hint is None else f"{first} ({hint})"


def first_line(error):
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
