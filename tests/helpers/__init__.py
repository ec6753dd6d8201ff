"""What tests of several rooms share; ROOT is the checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
