// What the document of the API says of settings.
import { get } from "./api.svelte.js";

let document = null;

/** {defaults, descriptions} of the settings, by name, from the document of the API; asked for once. */
export function described() {
  document ??= get("openapi.json").then(({ components }) => {
    const { JobSettings, Scheduling } = components.schemas;
    const scheduling = Object.entries(Scheduling.properties).map(([name, each]) => [`scheduling.${name}`, each]);
    const given = [...Object.entries(JobSettings.properties), ...scheduling];
    return {
      defaults: Object.fromEntries(given.filter(([, each]) => "default" in each).map(([name, each]) => [name, each.default])),
      descriptions: Object.fromEntries(given.map(([name, each]) => [name, each.description ?? ""])),
    };
  });
  document.catch(() => (document = null)); // the next one who asks tries again
  return document;
}
