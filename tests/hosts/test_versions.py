import warnings

import pytest

from trimtab.hosts import versions


def test_other_versions_are_refused_or_warned_about_with_the_tested_range(monkeypatch):
    monkeypatch.setattr(versions, "TESTED", {"host": ("5.20", "5.22")})
    installed = {"host": "5.19.3"}
    monkeypatch.setattr(versions.metadata, "version", lambda name: installed[name])
    with pytest.raises(ImportError, match=r"host 5.19.3 is older .* \(5.20 to 5.22\); pip install 'host>=5.20'"):
        versions.check_version("host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for installed["host"] in ("5.20.0", "5.21.1", "5.22.7", "5.22.0rc1"):
            versions.check_version("host")
    for installed["host"] in ("5.23.0", "6.0"):
        with pytest.warns(UserWarning, match="newer"):
            versions.check_version("host")
