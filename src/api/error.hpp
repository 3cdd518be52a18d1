// The way every entry point fails: a status, with a message for the calling thread.
#pragma once

#include "gatedelta/gatedelta.h"

namespace gatedelta::api {

// Both keep the message for gd_last_error() and return the status; invalid() is the common GD_INVALID_ARGUMENT.
[[gnu::format(printf, 2, 3)]] gd_status refuse(gd_status status, const char* format, ...);
[[gnu::format(printf, 1, 2)]] gd_status invalid(const char* format, ...);

}  // namespace gatedelta::api

// Leaves the function with the status of a rule that does not hold.
#define GD_TRY(rule) \
  if (const gd_status status_ = (rule); status_ != GD_OK) return status_
