// SPDX-License-Identifier: Apache-2.0
// What Python holds: a compiled problem with the memory of one evaluator.
#pragma once
#include <utility>

#include "schedule.h"

namespace stretto {
struct ScheduleObject {
  explicit ScheduleObject(sched::Problem&& p) : problem(std::move(p)), scratch(problem) {}
  ScheduleObject(const ScheduleObject&) = delete;
  sched::Problem problem;
  sched::Evaluator scratch;
};
}  // namespace stretto
