"""Plotly figures and static pictures: pure functions of traces, profiles and results."""
