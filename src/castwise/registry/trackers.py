"""Experiment trackers that scripts use, and the environment variables that switch each off."""

import os
import sys

# What switches a tracker off, by its package; a variable that the user has set stays. Source: the trackers'
# documentation of their environment variables.
TRACKER_MODES = {
    "wandb": {"WANDB_MODE": "disabled"},
    "neptune": {"NEPTUNE_MODE": "offline"},
    "neptune_scale": {"NEPTUNE_MODE": "offline"},
    "clearml": {"CLEARML_OFFLINE_MODE": "1"},
    "swanlab": {"SWANLAB_MODE": "disabled"},
    "comet_ml": {"COMET_AUTO_LOG_DISABLE": "1", "COMET_START_ONLINE": "0"},
}
# Those that write to the scratch folder, whatever the user has set: the variable is where their team's runs are.
TRACKER_PLACES = {"mlflow": "MLFLOW_TRACKING_URI", "comet_ml": "COMET_OFFLINE_DIRECTORY", "trackio": "TRACKIO_DIR"}
OF_ONE_STORE = ("MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID")
_WITHOUT_VARIABLES = ("tensorboard", "tensorboardX", "lightning", "pytorch_lightning")


def trackers_off() -> list[str]:
    """Return the packages that this process has imported, and whose runs castwise keeps from the user's places."""
    names = dict.fromkeys([*TRACKER_MODES, *TRACKER_PLACES, *_WITHOUT_VARIABLES])
    on = {
        name
        for name, variables in TRACKER_MODES.items()
        if any(os.environ.get(variable, value) != value for variable, value in variables.items())
    }
    return [name for name in names if name not in on and name in sys.modules]
