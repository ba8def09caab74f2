// Everything a C++ user of rlk includes.
#pragma once

#include "rlk/evidence.hpp"
#include "rlk/ops.hpp"
#include "rlk/options.hpp"
#include "rlk/resolve.hpp"
#include "rlk/rlk.h"
#include "rlk/saved.hpp"
#include "rlk/status.hpp"
#include "rlk/tensor.hpp"
