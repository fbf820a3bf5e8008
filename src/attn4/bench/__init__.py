"""Timing attention against its peers: a benchmark is a row, and a plot is drawn from rows alone.

``cases`` says what is timed, ``peers`` who takes part, ``check`` that a result is right, ``gradients`` the
same of a backward pass, ``timing`` how time is taken, ``telemetry`` what the device did meanwhile,
``session`` puts a cell together, ``rows`` keeps the result, ``table`` and ``plots`` show it.
"""
