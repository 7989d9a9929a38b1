"""The requirements of a wheel, one a line, without some and without extras.

python scripts/wheel_requirements.py FILE.whl --without torch torchvision
"""

from __future__ import annotations

import argparse
import re
import zipfile
from email.parser import BytesParser

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("wheel")
parser.add_argument("--without", nargs="*", default=[])
options = parser.parse_args()

with zipfile.ZipFile(options.wheel) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = BytesParser().parsebytes(wheel.read(name))
for requirement in metadata.get_all("Requires-Dist", []):
    package = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()
    if "extra ==" not in requirement and package not in options.without:
        print(requirement)
