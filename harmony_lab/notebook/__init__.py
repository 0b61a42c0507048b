"""Views of a Lab in a notebook: magics, the dashboard and the panel of a run."""
