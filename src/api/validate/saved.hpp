// Which call `saved` is of, so that none reads what another one's inputs left there.
#pragma once

#include "api/validate/checker.hpp"

namespace gatedelta::api {

// As a forward of this layer writes it, and as its backward expects it.
gd_saved_call saved_call_of(const Layer& layer, const gd_exec& exec, bool batch_invariant);

// What a call may read of `saved`: prepare's results, which no initial state changes, or all of it.
enum class SavedPart { prepared, all };

// `given` is `expected`, as far as that part depends on it. It may be absent where nothing is read, and in a query.
gd_status check_saved_call(Stage stage, bool is_read, SavedPart part, const gd_saved_call& given,
                           const gd_saved_call& expected);

}  // namespace gatedelta::api
