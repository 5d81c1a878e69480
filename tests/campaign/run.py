"""Runs campaigns for as long as is asked for, or one program again.

    python tests/campaign/run.py [CAMPAIGN ...] --minutes 60 --seed 7
    python tests/campaign/run.py CAMPAIGN --program JSON

What fails is printed with its seed and a command that repeats it, and the search goes on; the exit status is 1 then.
"""

import argparse
import collections
import json
import sys
import time

from hunt import CAMPAIGNS, Child, Finding, hunt


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"any of {', '.join(CAMPAIGNS)}; default: all")
    parser.add_argument("--minutes", type=float, default=10, help="how long to search (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="what the first programs are drawn from (default: 0)")
    parser.add_argument("--program", type=json.loads, help="run this program, of the one campaign that is named")
    given = parser.parse_args()
    unknown = set(given.campaigns) - set(CAMPAIGNS)
    if unknown:
        parser.error(f"no campaign is called {sorted(unknown)[0]!r}: there are {', '.join(CAMPAIGNS)}")
    if given.program is not None and len(given.campaigns) != 1:
        parser.error("--program needs the name of one campaign")
    return given


def search(campaigns, minutes, seed):
    """Run rounds of all campaigns until the time is over; return how many programs failed."""
    end, failed = time.monotonic() + 60 * minutes, 0
    counts = {campaign: collections.Counter() for campaign in campaigns}
    while time.monotonic() < end:
        for campaign in campaigns:
            if time.monotonic() >= end:
                break
            try:
                counts[campaign].update(hunt(campaign, seed, CAMPAIGNS[campaign][1], end))
            except Finding as finding:
                failed += 1
                print(f"\n=== {campaign}, seed {seed}: FAILED\n{finding}\n", flush=True)
        seed += 1
    for campaign, counted in counts.items():
        print(f"{campaign}: {', '.join(f'{number} {what}' for what, number in sorted(counted.items()))}")
    return failed


def main():
    given = arguments()
    if given.program is None:
        return int(search(given.campaigns or list(CAMPAIGNS), given.minutes, given.seed) > 0)
    with Child() as child:
        try:
            print(child.run(given.campaigns[0], given.program))
        except Finding as finding:
            print(finding)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
