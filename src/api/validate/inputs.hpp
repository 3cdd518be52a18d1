#pragma once

#include "api/validate/checker.hpp"

namespace gatedelta::api {

gd_status validate_layer(Checker& check, const gd_inputs& in, Layer& layer);

}  // namespace gatedelta::api
