"""The runtime room: pools, speculation, scheduler, session, engine; imported as `trtllm_replayssm.runtime`."""
