// Fetches the numbers once a second and shows them. All text goes in as text, never as markup.
"use strict";

const INTERVAL_MS = 1000;
const MAX_CELLS = 600; // of one worker's map; beyond, a cell stands for several pages
const TOKEN = "kvservice-token";
const byId = (id) => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) { number /= 1024; unit += 1; }
  return `${number >= 100 || unit === 0 ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
}

const whole = (number) => (number === null ? "–" : Math.round(number).toLocaleString("en"));
const millis = (seconds) => (seconds === null ? "–" : `${(seconds * 1000).toPrecision(3)} ms`);

function showAlerts(alerts) {
  const items = alerts.map((alert) => element("li", "bad",
    `${alert.name}${alert.workerId ? ` (${alert.workerId})` : ""}: ${alert.text}`));
  byId("alerts").replaceChildren(...(items.length ? items : [element("li", "", "none")]));
}

function showTotals(total) {
  const numbers = [
    ["sessions", whole(total.sessions)], ["pages used", whole(total.usedPages)],
    ["bytes used", bytes(total.usedBytes)], ["budget", bytes(total.budgetBytes)],
    ["tokens/s", whole(total.tokensPerSecond)], ["layers/s", whole(total.layersPerSecond)],
    ["p99 of a layer", millis(total.p99Seconds)],
  ].map(([name, value]) => {
    const box = element("div", "number", name);
    box.dataset.name = name;
    box.prepend(element("b", "", value));
    return box;
  });
  byId("totals").replaceChildren(...numbers);
}

// Pages by state, pool by pool, and what of the budget no page has taken yet.
function pageMap(worker, pools) {
  const map = element("div", "map");
  const taken = pools.reduce((sum, p) => sum + (p.used + p.reserved + p.free) * p.pageBytes, 0);
  const pages = pools.reduce((sum, p) => sum + p.used + p.reserved + p.free, 0);
  const pageBytes = pages && taken ? taken / pages : 0;
  const rest = pageBytes ? Math.floor((worker.budgetBytes - taken) / pageBytes) : 0;
  const perCell = Math.max(1, Math.ceil((pages + rest) / MAX_CELLS));
  const add = (state, count, title) => {
    for (let left = count; left > 0; left -= perCell) {
      const cell = element("span", `cell ${state}`);
      cell.title = title;
      map.append(cell);
    }
  };
  for (const pool of pools) {
    const name = `pool ${pool.pool}, ${bytes(pool.pageBytes)} and ${pool.pageTokens} tokens a page`;
    for (const state of ["used", "reserved", "free"]) {
      add(state, pool[state], `${name}: ${pool[state]} ${state}`);
    }
  }
  add("rest", rest, `room for ${rest} more pages`);
  map.setAttribute("role", "img");
  map.setAttribute("aria-label", `${worker.usedPages} pages used, ${worker.reservedPages} `
    + `reserved, ${worker.freePages} free; ${perCell} pages a cell`);
  return map;
}

function showWorkers(workers, pools) {
  byId("workers").replaceChildren(...workers.map((worker) => {
    const box = element("article", "worker");
    box.dataset.worker = worker.workerId;
    const title = element("h3", "", `${worker.workerId} `);
    title.append(element("span", `state ${worker.state}`, worker.state), ` ${worker.address}`);
    const facts = element("p", "facts",
      `${worker.sessions} session${worker.sessions === 1 ? "" : "s"} · ${whole(worker.usedPages)} used, `
      + `${whole(worker.reservedPages)} reserved, ${whole(worker.freePages)} free pages · `
      + `${bytes(worker.usedBytes)} of ${bytes(worker.budgetBytes)} · `
      + `${whole(worker.tokensPerSecond)} tokens/s · p99 ${millis(worker.p99Seconds)}`);
    box.append(title, facts, pageMap(worker, pools[worker.workerId] || []));
    return box;
  }));
}

function row(cells) {
  const made = element("tr");
  made.append(...cells.map((cell) => (cell instanceof Node ? cell : element("td", "", cell))));
  return made;
}

function showSessions(sessions) {
  byId("session-count").textContent = sessions.length ? `(${sessions.length})` : "(none)";
  byId("sessions").replaceChildren(...sessions.map((session) => {
    const id = element("td");
    id.append(element("code", "", session.id));
    return row([id, session.workers.join(", "), session.rows, session.longest, session.epoch,
      session.step]);
  }));
}

function showEvents(events) {
  byId("events").replaceChildren(...events.slice(0, 50).map((event) =>
    row([new Date(event.at * 1000).toLocaleTimeString(), event.workerId, event.text])));
}

function show(numbers) {
  const { service } = numbers;
  byId("service").textContent =
    `${service.version} at ${service.address}, up ${whole(service.uptimeSeconds)} s`;
  showAlerts(numbers.alerts);
  showTotals(numbers.total);
  showWorkers(numbers.workers, numbers.pools);
  showSessions(numbers.sessions);
  showEvents(numbers.events);
}

function say(text, isBad) {
  byId("live").textContent = text;
  byId("live").className = isBad ? "bad" : "";
}

async function look() {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  try {
    const answer = await fetch("/status.json", { headers, cache: "no-store" });
    const locked = answer.status === 401 || answer.status === 403;
    byId("login").hidden = !locked;
    byId("board").hidden = locked;
    if (locked) {
      say(token ? "this token may not" : "locked", Boolean(token));
    } else if (answer.ok) {
      show(await answer.json());
      say(`live · ${new Date().toLocaleTimeString()}`, false);
    } else {
      say(`the manager answers ${answer.status}`, true);
    }
  } catch (error) {
    say("the manager does not answer", true);
  }
  setTimeout(look, INTERVAL_MS);
}

byId("enter").addEventListener("click", () => {
  sessionStorage.setItem(TOKEN, byId("token").value.trim());
  byId("token").value = "";
});
look();
