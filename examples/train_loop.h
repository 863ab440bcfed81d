// The training loop: steps, evaluations, checkpoints, and when to stop.
#pragma once

#include "report.h"
#include "train_folder.h"
#include "train_state.h"

namespace examples {

enum class Ending { all_steps, no_improvement, signal, output_lost };

// Trains from where `training` is to the end, or until SIGINT or SIGTERM arrives or standard output is lost, which
// finishes the step. Evaluates, reports, writes metrics and saves as `o` says; always saves in the end. `saved` is
// whether `folder` holds a checkpoint of where `training` is. Throws when a step is not finite (unless it is to be
// skipped) or a file cannot be written; the checkpoints of before stay.
Ending train(Training& training, const TrainingData& data, const TrainOptions& o, const RunFolder& folder,
             MetricsFile& metrics, bool saved);

}  // namespace examples
