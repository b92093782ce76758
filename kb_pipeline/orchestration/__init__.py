"""Dagster, and nothing else: it translates between the web UI and the core. No other package imports dagster."""
