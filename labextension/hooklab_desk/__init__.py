"""What runs beside JupyterLab, without PyTorch: the command `hooklab`, the working copy, and what the progress panel asks for."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "hooklab_desk.server"}]
