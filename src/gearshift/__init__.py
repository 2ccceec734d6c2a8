"""Gearshift: serve language models to many teams, and spend the expensive model only where it pays."""

__version__ = "0.1.0"
