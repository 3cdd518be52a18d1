// `gatedelta check --sweep`: random hard cases, and the worst share of its bound that each quantity takes.
#pragma once

#include "cli/options.hpp"
#include "cli/report.hpp"
#include "testing/judge.hpp"

namespace gatedelta::cli {

// Every call of a case on a device, judged.
using Judgements = std::vector<std::pair<std::string, testing::Judgement>>;
Judgements judge_calls(const Device& device, Op op, testing::Judge& judge, const testing::Exec& exec);

// Returns the exit status.
int sweep_command(const Options& options, const Device& device, const std::vector<gd_isa>& isas, int threads,
                  const Report& report);

}  // namespace gatedelta::cli
