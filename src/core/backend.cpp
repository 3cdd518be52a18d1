#include "core/backend.hpp"

#include <cstdarg>
#include <cstdio>

namespace gatedelta {

Outcome refusal(gd_status status, const char* format, ...) {
  Outcome outcome{status};
  va_list values;
  va_start(values, format);
  std::vsnprintf(outcome.message, sizeof outcome.message, format, values);
  va_end(values);
  return outcome;
}

}  // namespace gatedelta
