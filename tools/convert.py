"""`megappo convert` as a script: python tools/convert.py to-megatron|to-hf|verify|inspect ..."""

import sys

from megappo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
