// How the C++ side of the engine reports errors: a function that can throw returns null on success, or an error message from
// malloc, which the Rust side frees. No exception crosses the language border.

#pragma once

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <exception>

namespace {

// A copy of the first line; libtorch appends a C++ stack trace after it.
inline char *message(const char *text) {
  const char *end = std::strchr(text, '\n');
  size_t length = end ? static_cast<size_t>(end - text) : std::strlen(text);
  char *copy = static_cast<char *>(std::malloc(length + 1));
  if (copy) {
    std::memcpy(copy, text, length);
    copy[length] = 0;
  }
  return copy;
}

template <typename F> char *guarded(F &&body) {
  try {
    body();
    return nullptr;
  } catch (const c10::Error &e) {
    return message(e.what_without_backtrace());
  } catch (const std::exception &e) {
    return message(e.what());
  } catch (...) {
    return message("an exception that is not a std::exception");
  }
}

} // namespace
