// Failed range checks of indices, which the host learns of when it waits for a stream.
#pragma once

#include "strobe/kernels/types.h"

namespace strobe::cuda {

// Throws when a check queued on the stream has failed; once. To be called after the stream's work is done.
void throw_index_fault(const Stream& stream);

// Drops what is known of a stream that is about to be destroyed.
void forget_index_fault(const Stream& stream);

}  // namespace strobe::cuda
