// A naive float64 reference of one FreeKV layer, written from the text of docs/contract.md alone. It includes
// nothing of the library, so that a mistake in the library cannot be repeated here.
#pragma once

#include "attention.hpp"
#include "codec.hpp"
#include "codes.hpp"
#include "correction.hpp"
#include "decoder.hpp"
#include "drift.hpp"
#include "formats.hpp"
#include "key_codes.hpp"
#include "numbers.hpp"
#include "pages.hpp"
#include "pooling.hpp"
#include "residency.hpp"
#include "results.hpp"
#include "rows.hpp"
#include "scoring.hpp"
#include "selection.hpp"
#include "settings.hpp"
#include "sketch.hpp"
#include "subspace.hpp"
#include "summaries.hpp"
