// Finds libtorch's operators by name and calls them with boxed arguments. Errors are reported as guarded.h
// describes.

#include "guarded.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

c10::TypePtr without_optional(c10::TypePtr type) {
  auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

// What a call has to know of a parameter, without the optional around its types.
struct Parameter {
  c10::TypePtr type;
  c10::TypeKind real;
  std::optional<int32_t> length;
};

} // namespace

extern "C" {

struct dg_operator {
  c10::OperatorHandle handle;
  std::vector<Parameter> parameters;
};

// An operator, which must outlive the call, with the arguments that are the same whenever it is called.
struct dg_call {
  const dg_operator *op;
  // A value for each parameter; those that every call gives are none. libtorch copies lists that it takes from here.
  torch::jit::Stack values;
  // Numbers where a tensor is expected. Each call makes tensors of its own of them, because it may return a view.
  std::vector<std::pair<size_t, at::Scalar>> numbers;
};

// An argument: `position` in the schema, and what `tag` says. The tags are those of `Tag` in operators.rs.
struct dg_argument {
  int32_t position;
  int32_t tag;
  int64_t integer;
  double number;
  const void *data;
  size_t count;
};
}

namespace {

enum Tag { kNone, kTensor, kTensors, kInt, kInts, kFloat, kFloats, kBool, kBools, kText, kDevice, kScalarType, kLayout, kMemoryFormat };

at::Scalar scalar_of(const dg_argument &a) {
  switch (a.tag) {
  case kInt:
    return at::Scalar(a.integer);
  case kFloat:
    return at::Scalar(a.number);
  default:
    return at::Scalar(a.integer != 0);
  }
}

// A number, as the type of the parameter wants it.
c10::IValue number(const c10::TypePtr &type, std::optional<int32_t> n, const dg_argument &a) {
  switch (type->kind()) {
  case c10::TypeKind::FloatType:
    return a.tag == kFloat ? a.number : static_cast<double>(a.integer);
  case c10::TypeKind::ListType: {
    size_t times = static_cast<size_t>(n.value_or(1));
    if (type->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::FloatType)
      return c10::List<double>(std::vector<double>(times, a.tag == kFloat ? a.number : static_cast<double>(a.integer)));
    TORCH_CHECK(a.tag == kInt, "expected integers, got another number");
    return c10::List<int64_t>(std::vector<int64_t>(times, a.integer));
  }
  case c10::TypeKind::BoolType:
    TORCH_CHECK(a.tag != kFloat, "expected a truth value, got a number");
    return a.integer != 0;
  case c10::TypeKind::NumberType:
    return c10::IValue(scalar_of(a));
  default:
    TORCH_CHECK(a.tag == kInt, "expected an integer, got another number");
    return a.integer;
  }
}

c10::IValue list(const c10::TypePtr &type, const dg_argument &a) {
  const auto *of = type->castRaw<c10::ListType>();
  TORCH_CHECK(of, "expected ", type->str(), ", got a list");
  auto kind = of->getElementType()->kind();
  if (a.tag == kTensors) {
    auto *tensors = static_cast<at::Tensor *const *>(a.data);
    if (kind == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> values;
      for (size_t i = 0; i < a.count; ++i)
        values.push_back(tensors[i] ? std::optional<at::Tensor>(*tensors[i]) : std::nullopt);
      return values;
    }
    c10::List<at::Tensor> values;
    for (size_t i = 0; i < a.count; ++i) {
      TORCH_CHECK(tensors[i], "expected a tensor, got none");
      values.push_back(*tensors[i]);
    }
    return values;
  }
  if (a.tag == kBools) {
    TORCH_CHECK(kind == c10::TypeKind::BoolType, "expected ", type->str(), ", got truth values");
    auto *flags = static_cast<const uint8_t *>(a.data);
    c10::List<bool> values;
    for (size_t i = 0; i < a.count; ++i)
      values.push_back(flags[i] != 0);
    return values;
  }
  if (kind == c10::TypeKind::FloatType) {
    c10::List<double> values;
    for (size_t i = 0; i < a.count; ++i)
      values.push_back(a.tag == kInts ? static_cast<double>(static_cast<const int64_t *>(a.data)[i])
                                      : static_cast<const double *>(a.data)[i]);
    return values;
  }
  TORCH_CHECK(a.tag == kInts, "expected integers, got numbers");
  auto *numbers = static_cast<const int64_t *>(a.data);
  return c10::List<int64_t>(std::vector<int64_t>(numbers, numbers + a.count));
}

// Element types, layouts and memory formats are plain integers in a schema's `type`, and libtorch casts those to its
// enumerations unchecked. Only `real_type` tells them apart from integers.
c10::IValue enumerator(c10::TypeKind wanted, const dg_argument &a) {
  bool known = false;
  switch (wanted) {
  case c10::TypeKind::ScalarTypeType:
    switch (static_cast<c10::ScalarType>(a.integer)) {
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::Half:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Bool:
    case c10::ScalarType::BFloat16:
      known = a.integer >= 0 && a.integer <= INT8_MAX;
      break;
    default:
      break;
    }
    TORCH_CHECK(a.tag == kScalarType && known, "expected an element type that is supported, got another argument");
    break;
  case c10::TypeKind::LayoutType:
    known = a.integer == static_cast<int64_t>(c10::Layout::Strided);
    TORCH_CHECK(a.tag == kLayout && known, "expected the strided layout, got another argument");
    break;
  default:
    known = a.integer >= 0 && a.integer <= static_cast<int64_t>(c10::MemoryFormat::ChannelsLast);
    TORCH_CHECK(a.tag == kMemoryFormat && known, "expected a memory format, got another argument");
  }
  return a.integer;
}

bool is_enumeration(c10::TypeKind kind) {
  return kind == c10::TypeKind::ScalarTypeType || kind == c10::TypeKind::LayoutType || kind == c10::TypeKind::MemoryFormatType;
}

bool is_number(const dg_argument &a) { return a.tag == kInt || a.tag == kFloat || a.tag == kBool; }

c10::IValue boxed(const Parameter &parameter, const dg_argument &a, const c10::Device &device) {
  const c10::TypePtr &type = parameter.type;
  if (is_enumeration(parameter.real) && a.tag != kNone)
    return enumerator(parameter.real, a);
  switch (a.tag) {
  case kNone:
    return c10::IValue();
  case kTensor:
    return c10::IValue(*static_cast<const at::Tensor *>(a.data));
  case kInt:
  case kFloat:
  case kBool:
    if (type->kind() == c10::TypeKind::TensorType)
      return at::native::wrapped_scalar_tensor(scalar_of(a));
    return number(type, parameter.length, a);
  case kText:
    return c10::IValue(std::string(static_cast<const char *>(a.data), a.count));
  case kDevice:
    return c10::IValue(device);
  case kScalarType:
  case kLayout:
  case kMemoryFormat:
    TORCH_CHECK(false, "expected ", type->str(), ", got an element type, a layout or a memory format");
  default:
    return list(type, a);
  }
}

void push(const at::Tensor &tensor, at::Tensor **results, size_t expected, size_t &count) {
  if (count < expected)
    results[count] = new at::Tensor(tensor);
  ++count;
}

} // namespace

extern "C" {

char *dg_operator_find(const char *name, const char *overload, dg_operator **result) {
  return guarded([&] {
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    std::vector<Parameter> parameters;
    for (const auto &parameter : handle.schema().arguments())
      parameters.push_back(
          {without_optional(parameter.type()), without_optional(parameter.real_type())->kind(), parameter.N()});
    *result = new dg_operator{handle, std::move(parameters)};
  });
}

void dg_operator_free(dg_operator *op) { delete op; }

// The position of a parameter, or -1.
int dg_operator_position(const dg_operator *op, const char *name) {
  auto found = op->handle.schema().argumentIndexWithName(name);
  return found ? *found : -1;
}

// What the schema says about memory: 1 if a result shares memory with an argument, 2 if an argument is changed as well.
int dg_operator_aliases(const dg_operator *op) {
  int found = 0;
  for (const auto &result : op->handle.schema().returns())
    if (result.alias_info())
      found |= 1;
  for (const auto &argument : op->handle.schema().arguments())
    if (argument.alias_info() && argument.alias_info()->isWrite())
      found |= 2;
  return found;
}

// Null if the operator does nothing but compute new tensors from tensors and numbers, as far as its schema says; else why not.
char *dg_operator_refusal(const dg_operator *op) {
  const auto &schema = op->handle.schema();
  char *refusal = nullptr;
  char *failure = guarded([&] {
    auto refuse = [&](const std::string &why) { refusal = message(why.c_str()); };
    if (schema.name().find("batch_norm") != std::string::npos)
      return refuse("it may change running statistics, which its schema does not say");
    for (const auto &argument : schema.arguments()) {
      if (argument.alias_info())
        return refuse("it changes `" + argument.name() + "`, or returns a view of it");
      c10::TypePtr type = argument.type();
      while (type->kind() == c10::TypeKind::OptionalType || type->kind() == c10::TypeKind::ListType)
        type = type->containedType(0);
      switch (type->kind()) {
      case c10::TypeKind::TensorType:
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
      case c10::TypeKind::FloatType:
      case c10::TypeKind::BoolType:
      case c10::TypeKind::NumberType:
      case c10::TypeKind::DeviceObjType:
        break;
      default:
        return refuse("its argument `" + argument.name() + "` is neither a tensor nor a number but of the type " +
                      argument.type()->str());
      }
    }
    if (schema.returns().empty())
      return refuse("it returns nothing");
    for (const auto &result : schema.returns()) {
      c10::TypePtr type = result.type();
      if (type->kind() == c10::TypeKind::ListType)
        type = type->containedType(0);
      if (result.alias_info() || type->kind() != c10::TypeKind::TensorType)
        return refuse("it returns a view, or something that is no tensor");
    }
    if (schema.name().find("unsafe") != std::string::npos)
      return refuse("it does not check its arguments");
    if (op->handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      return refuse("it is made of other operators, and may return a view, which its schema does not say");
  });
  return failure ? failure : refusal;
}

// Prepares calls with these arguments, where `given` has the positions of those that each call gives itself. The device is always
// one of the latter.
char *dg_call_prepare(const dg_operator *op, const dg_argument *fixed, size_t fixed_count, const int32_t *given,
                      size_t given_count, dg_call **result) {
  return guarded([&] {
    const auto &schema = op->handle.schema().arguments();
    auto call = std::make_unique<dg_call>(dg_call{op, torch::jit::Stack(schema.size()), {}});
    std::vector<bool> known(schema.size(), false);
    for (size_t i = 0; i < given_count; ++i)
      known.at(static_cast<size_t>(given[i])) = true;
    for (size_t i = 0; i < fixed_count; ++i) {
      const dg_argument &a = fixed[i];
      auto position = static_cast<size_t>(a.position);
      const Parameter &parameter = op->parameters.at(position);
      TORCH_CHECK(a.tag != kTensor && a.tag != kTensors && a.tag != kDevice, "tensors and the device come with each call");
      known[position] = true;
      if (is_number(a) && parameter.type->kind() == c10::TypeKind::TensorType)
        call->numbers.emplace_back(position, scalar_of(a));
      else
        call->values[position] = boxed(parameter, a, c10::Device(c10::kCPU));
    }
    for (size_t i = 0; i < schema.size(); ++i) {
      if (known[i])
        continue;
      TORCH_CHECK(schema[i].default_value(), "the argument `", schema[i].name(), "` is missing");
      call->values[i] = *schema[i].default_value();
    }
    *result = call.release();
  });
}

void dg_call_free(dg_call *call) { delete call; }

// Calls the operator. `results` has room for `expected` tensors; on failure none is left there.
char *dg_call_run(const dg_call *call, const dg_argument *given, size_t given_count, int cuda, at::Tensor **results,
                  size_t expected) {
  size_t count = 0;
  char *failure = guarded([&] {
    c10::Device device = cuda < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(cuda));
    torch::jit::Stack stack(call->values);
    for (const auto &[position, scalar] : call->numbers)
      stack[position] = at::native::wrapped_scalar_tensor(scalar);
    for (size_t i = 0; i < given_count; ++i) {
      auto position = static_cast<size_t>(given[i].position);
      stack[position] = boxed(call->op->parameters.at(position), given[i], device);
    }
    call->op->handle.callBoxed(stack);
    for (const auto &value : stack) {
      if (value.isTensor()) {
        push(value.toTensor(), results, expected, count);
      } else {
        TORCH_CHECK(value.isTensorList(), "it returned something that is no tensor");
        for (const at::Tensor &tensor : value.toTensorList())
          push(tensor, results, expected, count);
      }
    }
    TORCH_CHECK(count == expected, "it returned ", count, " tensors, and the graph has ", expected);
  });
  if (failure)
    for (size_t i = 0; i < count && i < expected; ++i)
      delete results[i];
  return failure;
}

// Whether the calling thread records operations for a backward pass.
bool dg_grad_enabled() { return at::GradMode::is_enabled(); }

// Seeds the generator that operators draw from which take none as argument.
char *dg_seed_default(int cuda, uint64_t seed) {
  return guarded([&] {
    c10::Device device = cuda < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(cuda));
    auto generator = at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  });
}

} // extern "C"
