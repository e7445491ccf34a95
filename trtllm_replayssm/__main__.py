"""`python -m trtllm_replayssm`: the command line."""

from trtllm_replayssm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
