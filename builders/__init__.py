"""The builder room: checkpoints and geometries into quantised checkpoints and engines; `trtllm_replayssm.builders`."""
